// SPDX-License-Identifier: Apache-2.0
// Reading and writing the folder; the values are read in tensor_load.h, written in
// tensor_convert.h.
#include "twell/checkpoint/checkpoint.h"

#include <nlohmann/json.hpp>
#include <unordered_map>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/checkpoint/checkpoint_tensors.h"
#include "twell/checkpoint/config_json.h"
#include "twell/checkpoint/convert_config.h"
#include "twell/checkpoint/safetensors.h"
#include "twell/checkpoint/tensor_convert.h"
#include "twell/checkpoint/tensor_load.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";

// Some writers store the head of a tied model as a second tensor. Every reader of a checkpoint goes
// through this check, so that a checkpoint loads on all devices or on none.
void require_tied_head_equal(const OpenCheckpoint& opened) {
  const TensorInfo* head = opened.tensors.find(kHead);
  if (head == nullptr || !opened.config.tied_embeddings) return;
  const TensorInfo& embedding = *opened.tensors.find(kEmbedding);
  TWELL_REQUIRE(head->shape == embedding.shape && equal_values(*head, embedding),
                "{}: config.json ties the embeddings, but {} differs from {}; set "
                "tie_word_embeddings to false",
                opened.tensors.source(), kHead, kEmbedding);
}

TensorToWrite tensor_to_write(const Model& model, const ParamSpec& spec, DType dtype) {
  const ConstMatrixF values(model.flat.data() + spec.offset, spec.rows, spec.cols);
  return {spec.name, std::string(dtype_name(dtype)), spec.stored_shape(),
          [values, dtype, transposed = spec.transposed](const ByteSink& sink) {
            transposed ? write_transposed(values, dtype, sink) : write_rows(values, dtype, sink);
          }};
}

OpenCheckpoint open_with_hashes_unread(const fs::path& folder) {
  const ModelConfig config = load_config(folder);
  OpenCheckpoint opened{config, parameter_table(config), CheckpointTensors(folder)};
  require_tensors_of(opened.tensors, config);
  require_tied_head_equal(opened);
  return opened;
}

}  // namespace

ModelConfig load_config(const fs::path& folder) {
  TWELL_REQUIRE(fs::is_directory(folder), "{} is not a checkpoint folder", folder.string());
  const fs::path path = folder / "config.json";
  return parse_config_text(read_file(path), path.string());
}

OpenCheckpoint open_checkpoint(const fs::path& folder) {
  OpenCheckpoint opened = open_with_hashes_unread(folder);
  opened.tensors.verify_hashes();
  return opened;
}

std::unique_ptr<Model> load_model(Context& ctx, const fs::path& folder) {
  // Everything that can be refused by its header is, before memory is taken for the model.
  const OpenCheckpoint opened = open_with_hashes_unread(folder);
  auto model = std::make_unique<Model>(opened.config);
  std::unordered_map<std::string_view, const ParamSpec*> specs;
  for (const ParamSpec& spec : model->table) specs.emplace(spec.name, &spec);
  const auto place_of = [&](const TensorInfo& info) -> TensorPlace {
    const auto found = specs.find(info.name);
    if (found == specs.end()) return {};
    const ParamSpec& spec = *found->second;
    return {MatrixF(model->flat.data() + spec.offset, spec.rows, spec.cols), spec.transposed};
  };
  for (const auto& [name, file] : opened.tensors.files()) load_tensors(ctx, file, place_of);
  return model;
}

void save_model(const Model& model, const fs::path& folder, DType dtype) {
  nlohmann::json config = config_to_json(model.config);
  config["torch_dtype"] = torch_dtype_name(dtype);
  write_file_atomic(folder / "config.json", config.dump(2) + "\n");
  std::vector<TensorToWrite> tensors;
  for (const ParamSpec& spec : model.table) tensors.push_back(tensor_to_write(model, spec, dtype));
  // transformers asks for the name of the framework.
  write_safetensors(folder / "model.safetensors", tensors, {{"format", "pt"}});
}

}  // namespace twell
