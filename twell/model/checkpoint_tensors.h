// SPDX-License-Identifier: Apache-2.0
// The tensors of a checkpoint folder: model.safetensors, or the shards that
// model.safetensors.index.json names. InputError names the file and the fault.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "twell/model/safetensors.h"

namespace twell {

class CheckpointTensors {
 public:
  explicit CheckpointTensors(const std::filesystem::path& folder);
  const TensorInfo* find(std::string_view name) const;  // null when there is none
  std::vector<const TensorInfo*> all() const;           // by name
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

std::string show_shape(const std::vector<int64_t>& shape);  // "[4096, 256]"

}  // namespace twell
