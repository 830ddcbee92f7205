// SPDX-License-Identifier: Apache-2.0
// Streams a file's bytes in bounded memory, decompressed by its extension (.gz, .xz, .zst).
//
// Multi-member gzip, concatenated xz streams and concatenated zstd frames are read as one. Zero
// padding after a gzip stream is skipped; any other data after the end of a stream is a fault.
// Dictionaries beyond 256 MiB (xz) and windows beyond 128 MiB (zstd --long) are refused.
// Every fault is an InputError naming the file and the reason.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

namespace twell {

bool is_compressed(const std::filesystem::path& path);  // by the file name's extension

class Decoder;
class FileInput;

class ByteReader {
 public:
  explicit ByteReader(const std::filesystem::path& path);  // must be a regular file
  ~ByteReader();
  ByteReader(ByteReader&&) noexcept;

  // Writes at least one byte to out and returns how many; 0 only at the end of the data.
  size_t read(std::span<char> out);
  int64_t file_bytes_read() const;  // bytes read from disk so far

 private:
  std::unique_ptr<FileInput> input_;
  std::unique_ptr<Decoder> decoder_;  // null for a plain file
};

}  // namespace twell
