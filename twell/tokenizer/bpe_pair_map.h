// SPDX-License-Identifier: Apache-2.0
// Open-addressing hash map from a pair of token ids to an index, without erasure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace twell {

class BpePairMap {
 public:
  static constexpr int32_t kNone = -1;

  explicit BpePairMap(size_t expected = 0) {
    size_t capacity = 64;
    while (capacity < 2 * expected) capacity *= 2;
    slots_.resize(capacity);
  }

  static uint64_t key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }

  int32_t find(int32_t left, int32_t right) const {
    return slots_[slot_of(key(left, right))].value;
  }

  // Returns the pair's value; a missing pair is first inserted with `value`.
  int32_t find_or_insert(int32_t left, int32_t right, int32_t value) {
    const uint64_t pair = key(left, right);
    Slot& slot = slots_[slot_of(pair)];
    if (slot.value != kNone) return slot.value;
    slot = {pair, value};
    if (2 * ++size_ > slots_.size()) grow();
    return value;
  }

 private:
  struct Slot {
    uint64_t pair = 0;
    int32_t value = kNone;
  };

  size_t slot_of(uint64_t pair) const {
    const size_t mask = slots_.size() - 1;
    uint64_t hash = pair * 0x9e3779b97f4a7c15u;  // 2^64 / golden ratio
    hash ^= hash >> 32;
    size_t i = hash & mask;
    while (slots_[i].value != kNone && slots_[i].pair != pair) i = (i + 1) & mask;
    return i;
  }

  void grow() {
    std::vector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.value != kNone) slots_[slot_of(slot.pair)] = slot;
    }
  }

  std::vector<Slot> slots_;
  size_t size_ = 0;
};

}  // namespace twell
