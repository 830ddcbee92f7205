// SPDX-License-Identifier: Apache-2.0
// Decodes Parquet's hybrid of RLE runs and bit-packed groups (levels and dictionary indices).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace twell {

class RleReader {
 public:
  RleReader() = default;
  // bit_width: bits per number, 0 to 32. The bytes and `where` must outlive the reader.
  RleReader(std::span<const std::byte> bytes, int bit_width, const std::string& where);

  // InputError when the bytes end early or are malformed.
  uint32_t next();

 private:
  void begin_run();
  std::span<const std::byte> take(uint64_t count);

  std::span<const std::byte> bytes_;  // bytes after the current run
  const std::string* where_ = nullptr;
  uint32_t bit_width_ = 0;
  uint64_t left_ = 0;  // numbers left in the current run
  bool packed_ = false;
  uint32_t repeated_ = 0;              // the number that an unpacked run repeats
  std::span<const std::byte> groups_;  // data of a packed run
  uint64_t bit_ = 0;                   // bit offset of the next number in groups_
};

}  // namespace twell
