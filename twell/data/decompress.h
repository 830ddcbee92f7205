// SPDX-License-Identifier: Apache-2.0
// The bytes of a file, decompressed as its name asks (.gz, .xz, .zst), streamed in bounded memory.
//
// Multi-member gzip, concatenated xz streams and concatenated zstd frames are read as one. Zero
// padding after a gzip stream is passed over; anything else behind the end of a stream is a fault.
// Dictionaries beyond 256 MiB (xz) and windows beyond 128 MiB (zstd --long) are refused.
// Every fault is an InputError naming the file and the reason.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

namespace twell {

enum class Compression { kNone, kGzip, kXz, kZstd };

// By the ending of the name.
Compression compression_of(const std::filesystem::path& path);

class Decoder;
class FileInput;

class ByteReader {
 public:
  explicit ByteReader(const std::filesystem::path& path);  // a regular file
  ~ByteReader();
  ByteReader(ByteReader&&) noexcept;

  // Puts at least one byte into out and returns how many; 0 only at the end of the data.
  size_t read(std::span<char> out);
  int64_t file_bytes_read() const;  // bytes taken from the disk so far

 private:
  std::unique_ptr<FileInput> input_;
  std::unique_ptr<Decoder> decoder_;  // null for a plain file
};

}  // namespace twell
