// SPDX-License-Identifier: Apache-2.0
// Reads Thrift's compact protocol, the encoding of Parquet's metadata, from untrusted bytes.
// InputError, naming the source, when they end early, are malformed, or nest too deeply.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace twell {

enum class ThriftType : uint8_t {
  kStop = 0,
  kTrue = 1,
  kFalse = 2,
  kByte = 3,
  kI16 = 4,
  kI32 = 5,
  kI64 = 6,
  kDouble = 7,
  kBinary = 8,
  kList = 9,
  kSet = 10,
  kMap = 11,
  kStruct = 12,
  kUuid = 13,
};

class ThriftReader {
 public:
  // The bytes and `source` must outlive the reader.
  ThriftReader(std::span<const std::byte> bytes, const std::string& source)
      : bytes_(bytes), source_(source) {}

  // Calls on_field(id, type) for each field of the struct at the cursor. on_field must read the
  // value with one of the functions below, or skip(type).
  template <typename OnField>
  void fields(const OnField& on_field) {
    enter();
    int32_t id = 0;
    ThriftType type{};
    while (next_field(id, type)) on_field(id, type);
    --depth_;
  }
  // Calls on_struct() for each element of the list of structs at the cursor; it must read one.
  template <typename OnStruct>
  void structs(ThriftType type, const OnStruct& on_struct) {
    enter();
    for (int64_t left = begin_structs(type); left > 0; --left) on_struct();
    --depth_;
  }

  void read(ThriftType type, int64_t& integer);
  void read(ThriftType type, int32_t& integer);
  bool boolean(ThriftType type);
  std::string_view binary(ThriftType type);
  void skip(ThriftType type);

  size_t position() const { return position_; }  // bytes read

 private:
  static constexpr int kMaxDepth = 32;

  [[noreturn]] void fail(std::string_view reason) const;
  void enter();
  bool next_field(int32_t& id, ThriftType& type);
  int64_t begin_structs(ThriftType type);
  std::pair<int64_t, ThriftType> list_header();
  std::span<const std::byte> take(size_t count);
  uint8_t byte() { return static_cast<uint8_t>(take(1)[0]); }
  uint64_t varint();
  int64_t zigzag();

  std::span<const std::byte> bytes_;
  const std::string& source_;
  size_t position_ = 0;
  int depth_ = 0;
};

}  // namespace twell
