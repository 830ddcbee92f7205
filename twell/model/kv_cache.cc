// SPDX-License-Identifier: Apache-2.0
#include "twell/model/kv_cache.h"

#include <numeric>

#include "twell/base/error.h"
#include "twell/ops/attention/attention.h"

namespace twell {
namespace {

int64_t blocks_for(int64_t tokens, int64_t block_tokens) {
  return (tokens + block_tokens - 1) / block_tokens;
}

}  // namespace

KvCache::KvCache(const ModelConfig& config, int64_t slots, int64_t capacity, int64_t block_tokens,
                 int64_t blocks)
    : capacity_(capacity), width_(config.kv_width()), block_tokens_(block_tokens), blocks_(blocks) {
  TWELL_REQUIRE(slots >= 1, "a cache needs at least one sequence, got {}", slots);
  TWELL_REQUIRE(capacity >= 1 && capacity <= config.context,
                "a sequence of {} tokens does not fit the model's context of {}", capacity,
                config.context);
  TWELL_REQUIRE(is_attention_block(block_tokens),
                "a block of {} tokens: 16, 32 and multiples of 64 are possible", block_tokens);
  lengths_.assign(static_cast<size_t>(slots), 0);
  tables_.resize(static_cast<size_t>(slots));
  if (blocks == 0) {
    const int64_t each = blocks_for(capacity, block_tokens);
    for (std::vector<int32_t>& table : tables_) {
      table.resize(static_cast<size_t>(each));
      std::iota(table.begin(), table.end(), static_cast<int32_t>(blocks_));
      blocks_ += each;
    }
  }
  keys_ = Buffer<float>(config.layers * blocks_ * block_tokens * width_);
  values_ = Buffer<float>(config.layers * blocks_ * block_tokens * width_);
}

int64_t KvCache::block_bytes(const ModelConfig& config, int64_t block_tokens) {
  return 2 * config.layers * block_tokens * config.kv_width() * static_cast<int64_t>(sizeof(float));
}

int64_t KvCache::bytes(const ModelConfig& config, int64_t slots, int64_t capacity,
                       int64_t block_tokens) {
  return slots * blocks_for(capacity, block_tokens) * block_bytes(config, block_tokens);
}

MatrixF KvCache::keys(int64_t layer) const {
  const int64_t rows = blocks_ * block_tokens_;
  return {keys_.data() + layer * rows * width_, rows, width_};
}

MatrixF KvCache::values(int64_t layer) const {
  const int64_t rows = blocks_ * block_tokens_;
  return {values_.data() + layer * rows * width_, rows, width_};
}

void KvCache::check_slot(int64_t slot) const {
  TWELL_CHECK(slot >= 0 && slot < slots(), "cache slot {} of {}", slot, slots());
}

std::span<const int32_t> KvCache::table(int64_t slot) const {
  check_slot(slot);
  return tables_[static_cast<size_t>(slot)];
}

void KvCache::set_table(int64_t slot, std::span<const int32_t> blocks) {
  check_slot(slot);
  for (const int32_t block : blocks) {
    TWELL_CHECK(block >= 0 && block < blocks_, "cache block {} of {}", block, blocks_);
  }
  tables_[static_cast<size_t>(slot)].assign(blocks.begin(), blocks.end());
}

int64_t KvCache::length(int64_t slot) const {
  check_slot(slot);
  return lengths_[static_cast<size_t>(slot)];
}

void KvCache::set_length(int64_t slot, int64_t length) {
  check_slot(slot);
  TWELL_CHECK(length >= 0 && length <= capacity_, "cache length {} of {}", length, capacity_);
  lengths_[static_cast<size_t>(slot)] = length;
}

}  // namespace twell
