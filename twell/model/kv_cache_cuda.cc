// SPDX-License-Identifier: Apache-2.0
#include "twell/model/kv_cache_cuda.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "twell/model/model_cuda.h"

namespace twell {
namespace {

int64_t blocks_for(int64_t tokens) { return (tokens + kKvBlock - 1) / kKvBlock; }

}  // namespace

KvCacheCuda::KvCacheCuda(const ModelConfig& config, int64_t slots, int64_t capacity, int64_t blocks)
    : capacity_(capacity),
      table_size_(blocks_for(capacity)),
      blocks_(blocks == 0 ? slots * table_size_ : blocks),
      layers_(config.layers),
      width_(config.kv_width()),
      layer_size_((blocks_ + 1) * kKvBlock * width_) {
  TWELL_REQUIRE(slots >= 1, "a cache needs at least one sequence, got {}", slots);
  TWELL_REQUIRE(capacity >= 1 && capacity <= config.context,
                "a sequence of {} tokens does not fit the model's context of {}", capacity,
                config.context);
  TWELL_REQUIRE(blocks_ < std::numeric_limits<int32_t>::max() / kKvBlock,
                "a cache of {} blocks of {} tokens: its rows are 32-bit numbers", blocks_,
                kKvBlock);
  require_device_memory((blocks_ + 1) * block_bytes(config) + 4 * slots * table_size_,
                        fmt::format("keys and values of {} tokens", blocks_ * kKvBlock));
  keys_ = DeviceBuffer<__nv_bfloat16>(config.layers * layer_size_);
  values_ = DeviceBuffer<__nv_bfloat16>(config.layers * layer_size_);
  TWELL_CUDA_CHECK(cudaMemset(values_.data(), 0, static_cast<size_t>(values_.bytes())));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));  // our streams do not wait for it
  tables_ = DeviceBuffer<int32_t>(slots * table_size_);
  slots_.resize(static_cast<size_t>(slots));
  if (blocks != 0) return;
  int32_t next = 1;
  for (Slot& slot : slots_) {
    slot.table.resize(static_cast<size_t>(table_size_));
    std::iota(slot.table.begin(), slot.table.end(), next);
    next += static_cast<int32_t>(table_size_);
  }
}

int64_t KvCacheCuda::token_bytes(const ModelConfig& config) {
  return 2 * config.layers * config.kv_width() * static_cast<int64_t>(sizeof(__nv_bfloat16));
}

int64_t KvCacheCuda::bytes(const ModelConfig& config, int64_t slots, int64_t capacity) {
  return slots * blocks_for(capacity) * block_bytes(config);
}

const KvCacheCuda::Slot& KvCacheCuda::at(int64_t slot) const {
  TWELL_CHECK(slot >= 0 && slot < slots(), "cache slot {} of {}", slot, slots());
  return slots_[static_cast<size_t>(slot)];
}

KvCacheCuda::Slot& KvCacheCuda::at(int64_t slot) {
  return const_cast<Slot&>(std::as_const(*this).at(slot));
}

int64_t KvCacheCuda::row(int64_t slot, int64_t position) const {
  const std::vector<int32_t>& table = at(slot).table;
  TWELL_CHECK(position >= 0 && position < std::ssize(table) * kKvBlock,
              "token {} of a sequence with {} blocks of {}", position, table.size(), kKvBlock);
  return kv_row(table[static_cast<size_t>(position / kKvBlock)], static_cast<int>(position));
}

void KvCacheCuda::set_table(int64_t number, std::span<const int32_t> blocks) {
  Slot& slot = at(number);
  TWELL_CHECK(std::ssize(blocks) <= table_size_, "a table of {} blocks for {} tokens",
              blocks.size(), capacity_);
  for (const int32_t block : blocks) {
    TWELL_CHECK(block >= 0 && block < blocks_, "cache block {} of {}", block, blocks_);
  }
  std::vector<int32_t> table;
  for (const int32_t block : blocks) table.push_back(block + 1);
  const auto changed = std::ranges::mismatch(slot.table, table).in2 - table.begin();
  slot.copied = std::min(slot.copied, int64_t{changed});
  slot.table = std::move(table);
}

void KvCacheCuda::enqueue_clear(std::span<const int32_t> blocks, cudaStream_t stream) const {
  const auto bytes = [](int64_t values) {
    return static_cast<size_t>(values) * sizeof(__nv_bfloat16);
  };
  const int64_t block_values = kKvBlock * width_;
  for (const int32_t block : blocks) {
    TWELL_CUDA_CHECK(cudaMemset2DAsync(values_.data() + (block + 1) * block_values,
                                       bytes(layer_size_), 0, bytes(block_values),
                                       static_cast<size_t>(layers_), stream));
  }
}

void KvCacheCuda::enqueue_tables(cudaStream_t stream) {
  for (int64_t number = 0; number < slots(); ++number) {
    Slot& slot = at(number);
    const int64_t size = std::ssize(slot.table);
    if (slot.copied == size) continue;
    // From memory that may change as soon as the call returns: CUDA stages small pageable data.
    TWELL_CUDA_CHECK(cudaMemcpyAsync(
        tables_.data() + table_begin(number) + slot.copied, slot.table.data() + slot.copied,
        static_cast<size_t>(size - slot.copied) * sizeof(int32_t), cudaMemcpyHostToDevice, stream));
    slot.copied = size;
  }
}

int64_t KvCacheCuda::length(int64_t slot) const { return at(slot).length; }

void KvCacheCuda::set_length(int64_t slot, int64_t length) {
  TWELL_CHECK(length >= 0 && length <= capacity_, "cache length {} of {}", length, capacity_);
  at(slot).length = length;
}

}  // namespace twell
