// SPDX-License-Identifier: Apache-2.0
#include "twell/parquet/rle.h"

#include <algorithm>
#include <cstring>

#include "twell/base/error.h"

namespace twell {

RleReader::RleReader(std::span<const std::byte> bytes, int bit_width, const std::string& where)
    : bytes_(bytes), where_(&where), bit_width_(static_cast<uint32_t>(bit_width)) {
  TWELL_REQUIRE(bit_width >= 0 && bit_width <= 32, "{}: a damaged page (numbers of {} bits)", where,
                bit_width);
}

std::span<const std::byte> RleReader::take(uint64_t count) {
  TWELL_REQUIRE(count <= bytes_.size(), "{}: a damaged page (levels or indices end early)",
                *where_);
  const auto taken = bytes_.first(static_cast<size_t>(count));
  bytes_ = bytes_.subspan(taken.size());
  return taken;
}

void RleReader::begin_run() {
  uint32_t head = 0;
  uint8_t next = 0x80;
  for (int shift = 0; next >= 0x80; shift += 7) {
    TWELL_REQUIRE(shift < 32, "{}: a damaged page (a run that is too long)", *where_);
    next = static_cast<uint8_t>(take(1)[0]);
    head |= static_cast<uint32_t>(next & 0x7F) << shift;
  }
  packed_ = (head & 1) != 0;
  const uint64_t count = head >> 1;
  TWELL_REQUIRE(count > 0, "{}: a damaged page (an empty run)", *where_);
  if (packed_) {
    left_ = count * 8;
    // Some writers truncate the last group.
    const uint64_t bytes = count * bit_width_;
    groups_ = take(std::min<uint64_t>(bytes, bytes_.size()));
    bit_ = 0;
  } else {
    left_ = count;
    repeated_ = 0;
    const auto bytes = take((bit_width_ + 7) / 8);
    if (!bytes.empty()) std::memcpy(&repeated_, bytes.data(), bytes.size());
  }
}

uint32_t RleReader::next() {
  if (left_ == 0) begin_run();
  --left_;
  if (!packed_) return repeated_;
  const uint64_t first = bit_ / 8, last = (bit_ + bit_width_ + 7) / 8;
  TWELL_REQUIRE(last <= groups_.size(), "{}: a damaged page (levels or indices end early)",
                *where_);
  uint64_t window = 0;  // 32 bits at any bit offset lie in at most five bytes
  if (last > first) std::memcpy(&window, groups_.data() + first, last - first);
  const uint64_t value = (window >> (bit_ % 8)) & ((uint64_t{1} << bit_width_) - 1);
  bit_ += bit_width_;
  return static_cast<uint32_t>(value);
}

}  // namespace twell
