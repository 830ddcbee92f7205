// SPDX-License-Identifier: Apache-2.0
// Safetensors files: an 8-byte little-endian header length, a JSON header, then the tensors' bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "twell/base/dtype.h"
#include "twell/base/file.h"

namespace twell {

struct TensorInfo {
  std::string name;
  std::string dtype;  // as in the file: "F32", "BF16", "F16", "U16", "I64", ...
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;  // in the mapped file
};

// A mapped file whose header has been checked in full: sizes, ranges, overlaps, dtypes, duplicates.
// InputError names the file and the fault.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  const TensorInfo& tensor(const std::string& name) const;  // InputError when missing
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  MappedFile file_;
  std::map<std::string, TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_;
};

// A tensor to be written: `write` produces its bytes in order through the sink it is given.
struct TensorToWrite {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::function<void(const std::function<void(std::span<const std::byte>)>& sink)> write;
};
// Streams the file (never a second copy of all tensors in memory); atomic.
void write_safetensors(const std::filesystem::path& path, std::span<const TensorToWrite> tensors,
                       const std::map<std::string, std::string>& metadata);

}  // namespace twell
