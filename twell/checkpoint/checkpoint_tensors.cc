// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/checkpoint_tensors.h"

#include <fmt/ranges.h>

#include <set>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/checkpoint/json.h"
#include "twell/checkpoint/tensor_convert.h"
#include "twell/model/weights.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

// A plain name in the checkpoint's own folder: no separators, so no way out of it.
bool is_plain_file_name(const std::string& name) {
  return name.ends_with(".safetensors") && name.find('/') == std::string::npos &&
         name.find('\\') == std::string::npos && name.find('\0') == std::string::npos &&
         !name.starts_with('.');
}

void require_tensor(const CheckpointTensors& tensors, const ParamSpec& spec,
                    const ModelConfig& config) {
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
  require_float(*info, tensors.source());
}

void require_no_extra(const CheckpointTensors& tensors, const std::vector<ParamSpec>& table,
                      const ModelConfig& config) {
  std::set<std::string_view> known;
  for (const ParamSpec& spec : table) known.insert(spec.name);
  for (const TensorInfo* info : tensors.all()) {
    TWELL_REQUIRE(known.contains(info->name) || may_be_extra(info->name, config),
                  "{}: tensor {} {} has no place in the model that config.json describes",
                  tensors.source(), info->name, show_shape(info->shape));
  }
}

}  // namespace

std::string show_shape(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

std::map<std::string, std::string> parse_shard_index(std::string_view text,
                                                     const std::string& source) {
  const nlohmann::json index = parse_json(text, source, /*max_depth=*/8);
  TWELL_REQUIRE(
      index.is_object() && index.contains("weight_map") && index["weight_map"].is_object(),
      "{}: weight_map is missing", source);
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file] : index["weight_map"].items()) {
    TWELL_REQUIRE(file.is_string() && is_plain_file_name(file.get<std::string>()),
                  "{}: tensor {} is mapped to {}, which is not the name of a .safetensors file in "
                  "this folder",
                  source, tensor, file.dump(-1, ' ', true));
    files.emplace(tensor, file.get<std::string>());
  }
  return files;
}

CheckpointTensors::CheckpointTensors(const fs::path& folder) {
  const fs::path single = folder / kSingleFile;
  if (fs::exists(single)) {
    source_ = single.string();
    const auto& file = files_.emplace(kSingleFile, SafetensorsFile(single)).first->second;
    for (const auto& [name, info] : file.tensors()) tensors_.emplace(name, &info);
    return;
  }
  TWELL_REQUIRE(fs::exists(folder / kIndexFile), "{} holds neither {} nor {}", folder.string(),
                kSingleFile, kIndexFile);
  read_shards(folder);
}

void CheckpointTensors::read_shards(const fs::path& folder) {
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
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : it->second;
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
  // Constants that old versions of transformers saved; the configuration implies them.
  if (name.ends_with(".rotary_emb.inv_freq")) return true;
  // Counters of the published sparse models: "model.layers.0.mlp.tracker.last_activated".
  if (name.find("tracker.") != std::string::npos) return true;
  return name == "lm_head.weight" && config.tied_embeddings;
}

void require_tensors_of(const CheckpointTensors& tensors, const ModelConfig& config) {
  const std::vector<ParamSpec> table = parameter_table(config);
  for (const ParamSpec& spec : table) require_tensor(tensors, spec, config);
  require_no_extra(tensors, table, config);
}

}  // namespace twell
