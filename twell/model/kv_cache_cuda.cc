// SPDX-License-Identifier: Apache-2.0
#include "twell/model/kv_cache_cuda.h"

#include <algorithm>
#include <limits>

#include "twell/base/rounding.h"
#include "twell/model/model_cuda.h"

namespace twell {

KvCacheCuda::KvCacheCuda(const ModelConfig& config, int64_t slots, int64_t capacity, int64_t blocks,
                         bool eight_bits)
    : KvTables(config, slots, capacity, kKvBlock, blocks),
      eight_bits_(eight_bits),
      table_size_(ceil_div(capacity, kKvBlock)),
      width_(config.kv_width()),
      head_dim_(config.head_dim),
      layer_size_((blocks_ + 1) * kKvBlock * width_),
      copied_(static_cast<size_t>(slots), 0) {
  TWELL_REQUIRE(blocks_ < std::numeric_limits<int32_t>::max() / kKvBlock,
                "a cache of {} blocks of {} tokens: its rows are 32-bit numbers", blocks_,
                kKvBlock);
  require_device_memory((blocks_ + 1) * block_bytes(config, eight_bits) + 4 * slots * table_size_,
                        fmt::format("keys and values of {} tokens", blocks_ * kKvBlock));
  const int64_t elements = config.layers * layer_size_;
  for (Rows* part : {&keys_, &values_}) {
    if (eight_bits) {
      part->bytes = DeviceBuffer<int8_t>(elements);
      part->scales = DeviceBuffer<float>(elements / head_dim_);
    } else {
      part->wide = DeviceBuffer<__nv_bfloat16>(elements);
    }
  }
  if (!eight_bits) {
    const auto bytes = [](int64_t values) {
      return static_cast<size_t>(values) * sizeof(__nv_bfloat16);
    };
    // Block 0 of each layer.
    TWELL_CUDA_CHECK(cudaMemset2D(values_.wide.data(), bytes(layer_size_), 0,
                                  bytes(kKvBlock * width_), static_cast<size_t>(config.layers)));
    TWELL_CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));  // our streams do not wait for it
  }
  tables_on_device_ = DeviceBuffer<int32_t>(slots * table_size_);
}

int64_t KvCacheCuda::token_bytes(const ModelConfig& config, bool eight_bits) {
  const int64_t row = eight_bits ? config.kv_width() + config.kv_heads * int64_t{sizeof(float)}
                                 : config.kv_width() * int64_t{sizeof(__nv_bfloat16)};
  return 2 * config.layers * row;
}

int64_t KvCacheCuda::bytes(const ModelConfig& config, int64_t slots, int64_t capacity,
                           bool eight_bits) {
  return slots * ceil_div(capacity, kKvBlock) * block_bytes(config, eight_bits);
}

int64_t KvCacheCuda::row(int64_t slot, int64_t position) const {
  const std::span<const int32_t> blocks = table(slot);
  TWELL_CHECK(position >= 0 && position < std::ssize(blocks) * kKvBlock,
              "token {} of a sequence with {} blocks of {}", position, blocks.size(), kKvBlock);
  return kv_row(blocks[static_cast<size_t>(position / kKvBlock)] + 1, static_cast<int>(position));
}

void KvCacheCuda::set_table(int64_t slot, std::span<const int32_t> blocks) {
  TWELL_CHECK(std::ssize(blocks) <= table_size_, "a table of {} blocks for {} tokens",
              blocks.size(), capacity_);
  const auto changed = std::ranges::mismatch(table(slot), blocks).in2 - blocks.begin();
  int64_t& copied = copied_[static_cast<size_t>(slot)];
  copied = std::min(copied, int64_t{changed});
  KvTables::set_table(slot, blocks);
}

void KvCacheCuda::enqueue_tables(cudaStream_t stream) {
  for (int64_t slot = 0; slot < slots(); ++slot) {
    int64_t& copied = copied_[static_cast<size_t>(slot)];
    std::vector<int32_t> blocks;
    for (const int32_t block : table(slot).subspan(static_cast<size_t>(copied))) {
      blocks.push_back(block + 1);
    }
    if (blocks.empty()) continue;
    // The copied memory may change as soon as the call returns: CUDA stages small pageable data.
    TWELL_CUDA_CHECK(cudaMemcpyAsync(tables_on_device_.data() + table_begin(slot) + copied,
                                     blocks.data(), blocks.size() * sizeof(int32_t),
                                     cudaMemcpyHostToDevice, stream));
    copied += std::ssize(blocks);
  }
}

}  // namespace twell
