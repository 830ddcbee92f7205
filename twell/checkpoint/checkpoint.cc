// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <unordered_map>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/checkpoint/config_json.h"
#include "twell/checkpoint/quantization.h"
#include "twell/checkpoint/tensor_convert.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

void require_tensor(const OpenCheckpoint& opened, const ParamSpec& spec) {
  const CheckpointTensors& tensors = opened.tensors;
  const ModelConfig& config = opened.config;
  const TensorInfo* info = tensors.find(spec.name);
  if (info == nullptr) {
    const bool gate = config.gated && spec.name.ends_with("mlp.gate_proj.weight");
    throw InputError(fmt::format("{}: tensor {} {} is missing{}", tensors.source(), spec.name,
                                 show_shape(spec.stored_shape()),
                                 gate ? "; config.json of a model without gate projections needs "
                                        "\"mlp_gated\": false"
                                      : ""));
  }
  TWELL_REQUIRE(info->shape == spec.stored_shape(),
                "{}: tensor {} has shape {}, but config.json asks for {}", tensors.source(),
                spec.name, show_shape(info->shape), show_shape(spec.stored_shape()));
  if (!opened.in_bytes(spec)) return require_float(*info, tensors.source());
  TWELL_REQUIRE(info->dtype == byte_type_name(opened.bytes->type),
                "{}: tensor {} is {}, but by its quantization_config {} is {}", tensors.source(),
                spec.name, info->dtype,
                is_head(spec) ? "the output head" : "every projection of a layer",
                byte_type_name(opened.bytes->type));
  const std::string name = scale_name(spec.name);
  const TensorInfo* scale = tensors.find(name);
  const std::vector<int64_t> shape = {spec.stored_shape()[0], 1};
  TWELL_REQUIRE(scale != nullptr, "{}: tensor {} {} is missing", tensors.source(), name,
                show_shape(shape));
  TWELL_REQUIRE(scale->shape == shape || scale->shape == std::vector<int64_t>{shape[0]},
                "{}: tensor {} has shape {}, but there must be one scale per output, {}",
                tensors.source(), name, show_shape(scale->shape), show_shape(shape));
  require_float(*scale, tensors.source());
}

void require_no_extra(const OpenCheckpoint& opened) {
  const auto& [config, table, tensors, bytes] = opened;
  std::set<std::string, std::less<>> known;
  for (const ParamSpec& spec : table) {
    known.insert(spec.name);
    if (opened.in_bytes(spec)) known.insert(scale_name(spec.name));
  }
  for (const TensorInfo* info : tensors.all()) {
    TWELL_REQUIRE(known.contains(info->name) || may_be_extra(info->name, config),
                  "{}: tensor {} {} has no place in the model that config.json describes",
                  tensors.source(), info->name, show_shape(info->shape));
  }
}

// Some writers store the head of a tied model as a second tensor. All devices use this check, so
// that a checkpoint loads on all of them or on none.
void require_tied_head_equal(const OpenCheckpoint& opened) {
  const TensorInfo* head = opened.tensors.find(kHeadName);
  if (head == nullptr || !opened.config.tied_embeddings) return;
  const TensorInfo& embedding = *opened.tensors.find(kEmbeddingName);
  if (head == &embedding) return;
  TWELL_REQUIRE(head->shape == embedding.shape && equal_values(*head, embedding),
                "{}: config.json ties the embeddings, but {} differs from {}; set "
                "tie_word_embeddings to false",
                opened.tensors.source(), kHeadName, kEmbeddingName);
}

TensorToWrite tensor_to_write(const Model& model, const ParamSpec& spec, DType dtype) {
  const ConstMatrixF values(model.flat.data() + spec.offset, spec.rows, spec.cols);
  return {spec.name, std::string(dtype_name(dtype)), spec.stored_shape(),
          [values, dtype, transposed = spec.transposed](const ByteSink& sink) {
            transposed ? write_transposed(values, dtype, sink) : write_rows(values, dtype, sink);
          }};
}

}  // namespace

CheckpointTensors::CheckpointTensors(const fs::path& folder) {
  const fs::path single = folder / kWeightsFile;
  if (fs::exists(single)) {
    source_ = single.string();
    const auto& file = files_.emplace(kWeightsFile, SafetensorsFile(single)).first->second;
    for (const auto& [name, info] : file.tensors()) tensors_.emplace(name, &info);
    return;
  }
  TWELL_REQUIRE(fs::exists(folder / kIndexFile), "{} holds neither {} nor {}", folder.string(),
                kWeightsFile, kIndexFile);
  source_ = (folder / kIndexFile).string();
  for (const auto& [tensor, file] : parse_shard_index(read_file(folder / kIndexFile), source_)) {
    if (!files_.contains(file)) files_.emplace(file, SafetensorsFile(folder / file));
    tensors_.emplace(tensor, &files_.at(file).tensor(tensor));
  }
  for (const auto& [file, content] : files_) {
    for (const auto& [name, info] : content.tensors()) {
      const auto it = tensors_.find(name);
      TWELL_REQUIRE(it != tensors_.end() && it->second == &info,
                    "{}: tensor {} of {} is not listed there", source_, name, file);
    }
  }
}

const TensorInfo* CheckpointTensors::find(std::string_view name) const {
  for (const auto* tensors : {&tensors_, &stand_ins_}) {
    const auto it = tensors->find(name);
    if (it != tensors->end()) return it->second;
  }
  return nullptr;
}

void CheckpointTensors::stand_in(std::string_view name, std::string_view other) {
  const TensorInfo* const info = find(other);
  if (info != nullptr && find(name) == nullptr) stand_ins_.emplace(name, info);
}

std::vector<const TensorInfo*> CheckpointTensors::all() const {
  std::vector<const TensorInfo*> out;
  for (const auto& [name, info] : tensors_) out.push_back(info);
  return out;
}

void CheckpointTensors::verify_hashes() const {
  for (const auto& [name, file] : files_) file.verify_hash();
}

bool may_be_extra(const std::string& name, const ModelConfig& config) {
  // Constants that old versions of transformers saved and that follow from the configuration.
  if (name.ends_with(".rotary_emb.inv_freq")) return true;
  // Counters of the published sparse models: "model.layers.0.mlp.tracker.last_activated".
  if (name.find("tracker.") != std::string::npos) return true;
  // What TurboSparse guesses active neurons with; they are found exactly here.
  if (config.family == Family::kBamboo && name.find(".mlp.predictor.") != std::string::npos) {
    return true;
  }
  return name == "lm_head.weight" && config.tied_embeddings;
}

bool OpenCheckpoint::is_extra(const TensorInfo& info) const {
  return may_be_extra(info.name, config) && tensors.find(kEmbeddingName) != &info;
}

ModelConfig load_config(const fs::path& folder) {
  TWELL_REQUIRE(!folder.empty(), "the path of a checkpoint is empty");
  TWELL_REQUIRE(fs::exists(folder), "{} does not exist", folder.string());
  TWELL_REQUIRE(fs::is_directory(folder), "{} is not a checkpoint folder", folder.string());
  const fs::path path = folder / kConfigFile;
  return parse_config_text(read_file(path), path.string());
}

std::optional<ByteWeights> load_weight_bytes(const fs::path& folder) {
  const fs::path path = folder / kConfigFile;
  std::optional<ByteWeights> bytes = parse_weight_bytes(read_file(path), path.string());
  if (bytes && load_config(folder).tied_embeddings) bytes->head = false;
  return bytes;
}

void OpenCheckpoint::untie_head() {
  if (!config.tied_embeddings) return;
  config.tied_embeddings = false;
  table = parameter_table(config);
  tensors.stand_in(kHeadName, kEmbeddingName);
}

bool OpenCheckpoint::in_bytes(const ParamSpec& spec) const {
  return bytes && (is_projection(spec) || (bytes->head && is_head(spec)));
}

StoredBytes stored_bytes(const OpenCheckpoint& opened, const ParamSpec& spec) {
  const TensorInfo& info = *opened.tensors.find(spec.name);
  const TensorInfo& scale = *opened.tensors.find(scale_name(spec.name));
  StoredBytes out{.type = opened.bytes->type,
                  .values = reinterpret_cast<const uint8_t*>(info.bytes.data()),
                  .scales = std::vector<float>(static_cast<size_t>(info.shape[0])),
                  .rows = info.shape[0],
                  .cols = info.shape[1]};
  read_tensor(scale, {.out = out.scales.data(), .rows = 1, .cols = out.rows}, 0, 1);
  for (size_t row = 0; row < out.scales.size(); ++row) {
    TWELL_REQUIRE(std::isfinite(out.scales[row]) && out.scales[row] >= 0.0f,
                  "{}: tensor {} has the value {} at row {}: a scale must be positive",
                  opened.tensors.source(), scale.name, out.scales[row], row);
  }
  return out;
}

// e4m3 has one NaN of either sign, int8 none.
void require_no_nan(const OpenCheckpoint& opened, const StoredBytes& bytes,
                    const std::string& name) {
  if (bytes.type != ByteType::kE4M3) return;
  const std::span<const uint8_t> values(bytes.values, static_cast<size_t>(bytes.rows * bytes.cols));
  const auto nan = std::ranges::find_if(values, [](uint8_t v) { return (v & 0x7f) == 0x7f; });
  TWELL_REQUIRE(nan == values.end(),
                "{}: tensor {} has the value NaN at {}: the weights are damaged",
                opened.tensors.source(), name, nan - values.begin());
}

void widen_stored_bytes(Context& ctx, const OpenCheckpoint& opened, const ParamSpec& spec,
                        float* out) {
  const StoredBytes bytes = stored_bytes(opened, spec);
  require_no_nan(opened, bytes, spec.name);
  const ByteMatrix matrix = bytes.view();
  const int64_t row_step = spec.transposed ? 1 : spec.cols,
                col_step = spec.transposed ? spec.cols : 1;
  ctx.parallel_for(bytes.rows, 64, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      float* to = out + row * row_step;
      for (int64_t col = 0; col < bytes.cols; ++col) to[col * col_step] = matrix.at(row, col);
    }
  });
}

OpenCheckpoint open_with_hashes_unread(const fs::path& folder) {
  const ModelConfig config = load_config(folder);
  OpenCheckpoint opened{config, parameter_table(config), CheckpointTensors(folder),
                        load_weight_bytes(folder)};
  // Some writers keep only the head of two tied tensors.
  if (config.tied_embeddings) opened.tensors.stand_in(kEmbeddingName, kHeadName);
  for (const ParamSpec& spec : opened.table) require_tensor(opened, spec);
  require_no_extra(opened);
  require_tied_head_equal(opened);
  return opened;
}

OpenCheckpoint open_checkpoint(const fs::path& folder) {
  OpenCheckpoint opened = open_with_hashes_unread(folder);
  opened.tensors.verify_hashes();
  return opened;
}

std::unique_ptr<Model> load_model(Context& ctx, const fs::path& folder,
                                  const LoadOptions& options) {
  // Refuse everything that the headers show to be wrong before allocating memory for the model. The
  // hashes are checked while the values are read.
  const OpenCheckpoint opened = open_with_hashes_unread(folder);
  auto model = std::make_unique<Model>(opened.config);
  std::unordered_map<const TensorInfo*, const ParamSpec*> specs;
  for (const ParamSpec& spec : model->table) specs.emplace(opened.tensors.find(spec.name), &spec);
  const auto place_of = [&](const TensorInfo& info) -> TensorPlace {
    const auto found = specs.find(&info);
    if (found == specs.end()) return {};
    const ParamSpec& spec = *found->second;
    if (opened.in_bytes(spec)) return {};
    return {.out = model->flat.data() + spec.offset,
            .rows = spec.rows,
            .cols = spec.cols,
            .transposed = spec.transposed};
  };
  for (const auto& [name, file] : opened.tensors.files())
    load_tensors(ctx, file, place_of, options);
  for (const ParamSpec& spec : model->table) {
    if (opened.in_bytes(spec)) {
      widen_stored_bytes(ctx, opened, spec, model->flat.data() + spec.offset);
    }
  }
  return model;
}

void save_model(const Model& model, const fs::path& folder, DType dtype) {
  write_file_atomic(folder / kConfigFile, config_to_text(model.config, dtype));
  std::vector<TensorToWrite> tensors;
  for (const ParamSpec& spec : model.table) tensors.push_back(tensor_to_write(model, spec, dtype));
  // transformers requires the name of a framework.
  write_safetensors(folder / kWeightsFile, tensors, {{"format", "pt"}});
}

}  // namespace twell
