// SPDX-License-Identifier: Apache-2.0
#include "twell/model/kv_cache.h"

#include "twell/base/error.h"

namespace twell {

KvCache::KvCache(const ModelConfig& config, int64_t slots, int64_t capacity)
    : layers_(config.layers), slots_(slots), capacity_(capacity), width_(config.kv_width()) {
  TWELL_REQUIRE(slots >= 1, "a cache needs at least one sequence, got {}", slots);
  TWELL_REQUIRE(capacity >= 1 && capacity <= config.context,
                "a sequence of {} tokens does not fit the model's context of {}", capacity,
                config.context);
  keys_ = Buffer<float>(layers_ * slots_ * capacity_ * width_);
  values_ = Buffer<float>(layers_ * slots_ * capacity_ * width_);
  lengths_.assign(static_cast<size_t>(slots), 0);
}

int64_t KvCache::bytes(const ModelConfig& config, int64_t slots, int64_t capacity) {
  return 2 * config.layers * slots * capacity * config.kv_width() *
         static_cast<int64_t>(sizeof(float));
}

MatrixF KvCache::keys(int64_t layer, int64_t slot) const {
  return {keys_.data() + (layer * slots_ + slot) * capacity_ * width_, capacity_, width_};
}

MatrixF KvCache::values(int64_t layer, int64_t slot) const {
  return {values_.data() + (layer * slots_ + slot) * capacity_ * width_, capacity_, width_};
}

int64_t KvCache::length(int64_t slot) const {
  TWELL_CHECK(slot >= 0 && slot < slots_, "cache slot {} of {}", slot, slots_);
  return lengths_[static_cast<size_t>(slot)];
}

void KvCache::set_length(int64_t slot, int64_t length) {
  TWELL_CHECK(slot >= 0 && slot < slots_, "cache slot {} of {}", slot, slots_);
  TWELL_CHECK(length >= 0 && length <= capacity_, "cache length {} of {}", length, capacity_);
  lengths_[static_cast<size_t>(slot)] = length;
}

}  // namespace twell
