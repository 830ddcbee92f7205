// SPDX-License-Identifier: Apache-2.0
#include "twell/model/kv_cache_cuda.h"

#include "twell/model/model_cuda.h"

namespace twell {

KvCacheCuda::KvCacheCuda(const ModelConfig& config, int64_t slots, int64_t capacity)
    : capacity_(capacity), layer_size_(slots * capacity * config.kv_width()) {
  TWELL_REQUIRE(slots >= 1, "a cache needs at least one sequence, got {}", slots);
  TWELL_REQUIRE(capacity >= 1 && capacity <= config.context,
                "a sequence of {} tokens does not fit the model's context of {}", capacity,
                config.context);
  require_device_memory(
      bytes(config, slots, capacity),
      fmt::format("keys and values of {} sequences of {} tokens", slots, capacity));
  keys_ = DeviceBuffer<__nv_bfloat16>(config.layers * layer_size_);
  values_ = DeviceBuffer<__nv_bfloat16>(config.layers * layer_size_);
  lengths_.assign(static_cast<size_t>(slots), 0);
}

int64_t KvCacheCuda::bytes(const ModelConfig& config, int64_t slots, int64_t capacity) {
  return 2 * config.layers * slots * capacity * config.kv_width() *
         static_cast<int64_t>(sizeof(__nv_bfloat16));
}

int64_t KvCacheCuda::length(int64_t slot) const {
  TWELL_CHECK(slot >= 0 && slot < slots(), "cache slot {} of {}", slot, slots());
  return lengths_[static_cast<size_t>(slot)];
}

void KvCacheCuda::set_length(int64_t slot, int64_t length) {
  TWELL_CHECK(slot >= 0 && slot < slots(), "cache slot {} of {}", slot, slots());
  TWELL_CHECK(length >= 0 && length <= capacity_, "cache length {} of {}", length, capacity_);
  lengths_[static_cast<size_t>(slot)] = length;
}

}  // namespace twell
