// SPDX-License-Identifier: Apache-2.0
// A checkpoint is a folder: config.json, model.safetensors (or shards and their index),
// tokenizer.json, and, for training, whatever the trainer adds. Hugging Face names and layouts.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "twell/base/dtype.h"
#include "twell/checkpoint/checkpoint_tensors.h"
#include "twell/model/weights.h"

namespace twell {

// Reads config.json and model.safetensors or its shards (any of F32, BF16, F16; converted to f32 on
// all threads as fast as the disk gives them), checking names, shapes, dtypes, sizes, and the
// content hash where the file carries one. InputError on any fault.
std::unique_ptr<Model> load_model(Context& ctx, const std::filesystem::path& folder);

// Its parts, for readers of their own: a folder of which everything has been checked but the values
// themselves, which lie in mapped files.
struct OpenCheckpoint {
  ModelConfig config;
  std::vector<ParamSpec> table;
  CheckpointTensors tensors;  // has every parameter of the table, in its shape, as floats
};
OpenCheckpoint open_checkpoint(const std::filesystem::path& folder);
ModelConfig load_config(const std::filesystem::path& folder);

// Writes config.json and model.safetensors into an existing folder (see
// write_folder_atomic).
void save_model(const Model& model, const std::filesystem::path& folder, DType dtype);

}  // namespace twell
