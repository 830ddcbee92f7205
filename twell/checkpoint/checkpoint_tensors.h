// SPDX-License-Identifier: Apache-2.0
// The tensors of a checkpoint folder: model.safetensors, or the shards that
// model.safetensors.index.json names. InputError names the file and the fault.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "twell/checkpoint/safetensors.h"
#include "twell/model/config.h"

namespace twell {

class CheckpointTensors {
 public:
  explicit CheckpointTensors(const std::filesystem::path& folder);
  const TensorInfo* find(std::string_view name) const;  // null when there is none
  std::vector<const TensorInfo*> all() const;           // by name
  const std::map<std::string, SafetensorsFile>& files() const { return files_; }
  void verify_hashes() const;
  const std::string& source() const { return source_; }  // the file to name in messages

 private:
  void read_shards(const std::filesystem::path& folder);

  std::string source_;
  std::map<std::string, SafetensorsFile> files_;
  std::map<std::string, const TensorInfo*, std::less<>> tensors_;
};

// File name of each tensor, out of the text of model.safetensors.index.json. A name that leads out
// of the folder is refused.
std::map<std::string, std::string> parse_shard_index(std::string_view text,
                                                     const std::string& source);

// Checks names, shapes and dtypes against the parameter table of a configuration.
void require_tensors_of(const CheckpointTensors& tensors, const ModelConfig& config);
// Tensors that a checkpoint may hold although the model has no parameter of that name.
bool may_be_extra(const std::string& name, const ModelConfig& config);

std::string show_shape(const std::vector<int64_t>& shape);  // "[4096, 256]"

}  // namespace twell
