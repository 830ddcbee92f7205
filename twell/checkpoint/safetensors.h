// SPDX-License-Identifier: Apache-2.0
// Safetensors files: an 8-byte little-endian header length, a JSON header, then the tensors' bytes.
// Also the index of a checkpoint in several such files (shards).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "twell/base/content_hash.h"
#include "twell/base/dtype.h"
#include "twell/base/file.h"

namespace twell {

struct TensorInfo {
  std::string name;
  std::string dtype;  // as in the file: "F32", "BF16", "F16", "U16", "I64", ...
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;  // in the mapped file
};

// The content of a file, its header checked in full: sizes, ranges, overlaps, gaps, dtypes and
// duplicates. Tensors' bytes point into `file`. InputError names the source and the fault.
struct SafetensorsContent {
  std::map<std::string, TensorInfo, std::less<>> tensors;
  std::map<std::string, std::string> metadata;

  std::vector<const TensorInfo*> file_order() const;  // sorted by the offset of their bytes
};
SafetensorsContent parse_safetensors(std::span<const std::byte> file, const std::string& source);

// A mapped file. InputError names the file and the fault.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  const auto& tensors() const { return content_.tensors; }
  const auto& metadata() const { return content_.metadata; }
  const std::filesystem::path& path() const { return file_.path(); }
  std::span<const std::byte> bytes() const { return file_.bytes(); }
  std::vector<const TensorInfo*> file_order() const { return content_.file_order(); }
  // See MappedFile.
  void expect_full_read() const { file_.expect_full_read(); }
  void release(std::span<const std::byte> part) const { file_.release(part); }
  const TensorInfo& tensor(std::string_view name) const;  // InputError when missing
  // Reads the whole file. InputError when the content does not match the hash stored in the file. A
  // file without a hash passes.
  void verify_hash() const;
  // The two parts of verify_hash, for callers that read everything anyway. Pass every tensor to the
  // result of begin_hash in name order, each followed by its bytes; no value: the file has no hash.
  std::optional<ContentHash> begin_hash() const;
  void require_hash(const ContentHash& hash) const;

 private:
  MappedFile file_;
  SafetensorsContent content_;
};

// A tensor to write: `write` sends its bytes in order to the given sink. It is called twice, first
// for the content hash, and must produce the same bytes.
struct TensorToWrite {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::function<void(const std::function<void(std::span<const std::byte>)>& sink)> write;
};
// Writes the file atomically, as a stream without a second copy of all tensors in memory, and adds
// the content hash to the metadata.
void write_safetensors(const std::filesystem::path& path, std::span<const TensorToWrite> tensors,
                       const std::map<std::string, std::string>& metadata);

// The file name of each tensor, from the text of model.safetensors.index.json. InputError on a name
// that refers to a file outside the folder.
std::map<std::string, std::string> parse_shard_index(std::string_view text,
                                                     const std::string& source);
// The index without the removed tensors, with the files of added ones, and with a new total size in
// bytes; an unchanged index keeps its text.
std::string rewrite_shard_index(const std::string& text, std::span<const std::string> removed,
                                std::optional<int64_t> total_size,
                                const std::map<std::string, std::string>& added = {});

}  // namespace twell
