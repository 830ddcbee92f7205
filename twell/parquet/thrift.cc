// SPDX-License-Identifier: Apache-2.0
#include "twell/parquet/thrift.h"

#include <limits>

#include "twell/base/error.h"

namespace twell {

void ThriftReader::fail(std::string_view reason) const {
  throw InputError(fmt::format("{}: damaged metadata ({} at byte {})", source_, reason, position_));
}

void ThriftReader::enter() {
  if (++depth_ > kMaxDepth) fail("nested too deeply");
}

std::span<const std::byte> ThriftReader::take(size_t count) {
  if (count > bytes_.size() - position_) fail("it ends early");
  position_ += count;
  return bytes_.subspan(position_ - count, count);
}

uint64_t ThriftReader::varint() {
  uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    const uint8_t next = byte();
    value |= static_cast<uint64_t>(next & 0x7F) << shift;
    if (next < 0x80) return value;
  }
  fail("a number that is too long");
}

int64_t ThriftReader::zigzag() {
  const uint64_t value = varint();
  return static_cast<int64_t>((value >> 1) ^ (~(value & 1) + 1));
}

bool ThriftReader::next_field(int32_t& id, ThriftType& type) {
  const uint8_t head = byte();
  type = static_cast<ThriftType>(head & 0x0F);
  if (type == ThriftType::kStop) return false;
  if (type > ThriftType::kUuid) fail("an unknown type");
  const int64_t next = (head >> 4) != 0 ? id + (head >> 4) : zigzag();
  if (next < 0 || next > std::numeric_limits<int16_t>::max()) fail("an impossible field");
  id = static_cast<int32_t>(next);
  return true;
}

std::pair<int64_t, ThriftType> ThriftReader::list_header() {
  const uint8_t head = byte();
  const auto type = static_cast<ThriftType>(head & 0x0F);
  const uint64_t size = (head >> 4) == 15 ? varint() : head >> 4;
  // Writers give an empty list any type of elements, also that of none.
  if (size == 0) return {0, type};
  if (type == ThriftType::kStop || type > ThriftType::kUuid) fail("an unknown type");
  // Every element takes at least one byte.
  if (size > bytes_.size() - position_) fail("a list longer than the data");
  return {static_cast<int64_t>(size), type};
}

int64_t ThriftReader::begin_structs(ThriftType type) {
  if (type != ThriftType::kList) fail("no list where one belongs");
  const auto [size, element] = list_header();
  if (size > 0 && element != ThriftType::kStruct) fail("a list of another type");
  return size;
}

void ThriftReader::read(ThriftType type, int64_t& integer) {
  const bool is_byte = type == ThriftType::kByte;
  if (!is_byte && (type < ThriftType::kI16 || type > ThriftType::kI64)) {
    fail("no integer where one belongs");
  }
  integer = is_byte ? static_cast<int8_t>(byte()) : zigzag();
}

void ThriftReader::read(ThriftType type, int32_t& integer) {
  int64_t value = 0;
  read(type, value);
  if (value != static_cast<int32_t>(value)) fail("a number out of range");
  integer = static_cast<int32_t>(value);
}

bool ThriftReader::boolean(ThriftType type) {
  if (type != ThriftType::kTrue && type != ThriftType::kFalse) fail("no flag where one belongs");
  return type == ThriftType::kTrue;
}

std::string_view ThriftReader::binary(ThriftType type) {
  if (type != ThriftType::kBinary) fail("no text where one belongs");
  const auto bytes = take(static_cast<size_t>(varint()));
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void ThriftReader::skip(ThriftType type) {
  // In a list or a map a boolean takes a byte; as a field it is encoded in the field's type.
  const auto skip_element = [&](ThriftType element) {
    if (element == ThriftType::kTrue || element == ThriftType::kFalse) {
      byte();
    } else {
      skip(element);
    }
  };
  enter();
  if (type == ThriftType::kByte) {
    byte();
  } else if (type >= ThriftType::kI16 && type <= ThriftType::kI64) {
    varint();
  } else if (type == ThriftType::kDouble) {
    take(8);
  } else if (type == ThriftType::kUuid) {
    take(16);
  } else if (type == ThriftType::kBinary) {
    binary(type);
  } else if (type == ThriftType::kList || type == ThriftType::kSet) {
    const auto [size, element] = list_header();
    for (int64_t i = 0; i < size; ++i) skip_element(element);
  } else if (type == ThriftType::kMap) {
    const uint64_t size = varint();
    if (size > bytes_.size() - position_) fail("a map longer than the data");
    const uint8_t types = size > 0 ? byte() : 0;
    for (uint64_t i = 0; i < size; ++i) {
      skip_element(static_cast<ThriftType>(types >> 4));
      skip_element(static_cast<ThriftType>(types & 0x0F));
    }
  } else if (type == ThriftType::kStruct) {
    fields([&](int32_t, ThriftType field) { skip(field); });
  } else if (type > ThriftType::kFalse) {
    fail("an unknown type");
  }
  --depth_;
}

}  // namespace twell
