// SPDX-License-Identifier: Apache-2.0
#include "twell/model/kv_cache.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "twell/base/error.h"
#include "twell/base/rounding.h"

namespace twell {

KvTables::KvTables(const ModelConfig& config, int64_t slots, int64_t capacity, int64_t block_tokens,
                   int64_t blocks)
    : capacity_(capacity), blocks_(blocks) {
  TWELL_REQUIRE(slots >= 1, "a cache needs at least one sequence, got {}", slots);
  TWELL_REQUIRE(capacity >= 1 && capacity <= config.context,
                "a sequence of {} tokens does not fit the model's context of {}", capacity,
                config.context);
  TWELL_REQUIRE(is_attention_block(block_tokens),
                "a block of {} tokens: 16, 32 and multiples of 64 are possible", block_tokens);
  lengths_.assign(static_cast<size_t>(slots), 0);
  tables_.resize(static_cast<size_t>(slots));
  if (blocks != 0) return;
  const int64_t each = ceil_div(capacity, block_tokens);
  for (std::vector<int32_t>& table : tables_) {
    table.resize(static_cast<size_t>(each));
    std::iota(table.begin(), table.end(), static_cast<int32_t>(blocks_));
    blocks_ += each;
  }
}

void KvTables::check_slot(int64_t slot) const {
  TWELL_CHECK(slot >= 0 && slot < slots(), "cache slot {} of {}", slot, slots());
}

std::span<const int32_t> KvTables::table(int64_t slot) const {
  check_slot(slot);
  return tables_[static_cast<size_t>(slot)];
}

void KvTables::set_table(int64_t slot, std::span<const int32_t> blocks) {
  check_slot(slot);
  for (const int32_t block : blocks) {
    TWELL_CHECK(block >= 0 && block < blocks_, "cache block {} of {}", block, blocks_);
  }
  tables_[static_cast<size_t>(slot)].assign(blocks.begin(), blocks.end());
}

int64_t KvTables::length(int64_t slot) const {
  check_slot(slot);
  return lengths_[static_cast<size_t>(slot)];
}

void KvTables::set_length(int64_t slot, int64_t length) {
  check_slot(slot);
  TWELL_CHECK(length >= 0 && length <= capacity_, "cache length {} of {}", length, capacity_);
  lengths_[static_cast<size_t>(slot)] = length;
}

KvCache::KvCache(const ModelConfig& config, int64_t slots, int64_t capacity, const KvFormat& format,
                 int64_t blocks)
    : KvTables(config, slots, capacity, format.block_tokens, blocks),
      format_(format),
      width_(config.kv_width()),
      head_dim_(config.head_dim) {
  const int64_t elements = config.layers * rows() * width_;
  for (Rows* part : {&keys_, &values_}) {
    if (format.eight_bits) {
      part->bytes = Buffer<int8_t>(elements);
      part->scales = Buffer<float>(elements / head_dim_);
    } else {
      part->floats = Buffer<float>(elements);
    }
  }
}

int64_t KvCache::block_bytes(const ModelConfig& config, const KvFormat& format) {
  const int64_t rows = 2 * config.layers * format.block_tokens;
  if (format.eight_bits) return rows * (config.kv_width() + config.kv_heads * int64_t{4});
  return rows * config.kv_width() * int64_t{4};
}

int64_t KvCache::bytes(const ModelConfig& config, int64_t slots, int64_t capacity,
                       const KvFormat& format) {
  return slots * ceil_div(capacity, format.block_tokens) * block_bytes(config, format);
}

void KvCache::write(const Rows& to, int64_t row, const float* from) const {
  if (!format_.eight_bits) {
    std::copy_n(from, width_, to.floats.data() + row * width_);
    return;
  }
  int8_t* bytes = to.bytes.data() + row * width_;
  float* scale = to.scales.data() + row * (width_ / head_dim_);
  for (const float* end = from + width_; from < end; from += head_dim_, bytes += head_dim_) {
    float largest = 0.0f;
    bool finite = true;
    for (int64_t i = 0; i < head_dim_; ++i) {
      largest = std::max(largest, std::abs(from[i]));
      finite = finite && std::isfinite(from[i]);
    }
    *scale++ = finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
    const float inverse = finite && largest > 0.0f ? 127.0f / largest : 0.0f;
    for (int64_t i = 0; i < head_dim_; ++i) {
      const float value = finite ? from[i] * inverse : 0.0f;
      bytes[i] = static_cast<int8_t>(std::lrintf(std::clamp(value, -127.0f, 127.0f)));
    }
  }
}

void KvCache::store(int64_t layer, int64_t slot, int64_t position, const float* keys,
                    const float* values) {
  const std::vector<int32_t>& table = tables_[static_cast<size_t>(slot)];
  const int32_t block = table[static_cast<size_t>(position / format_.block_tokens)];
  const int64_t row =
      layer * rows() + block * format_.block_tokens + position % format_.block_tokens;
  write(keys_, row, keys);
  write(values_, row, values);
}

void KvCache::show(int64_t layer, int64_t slot, int64_t tokens, AttentionSequence& sequence) const {
  sequence.blocks = table(slot).data();
  sequence.block_rows = format_.block_tokens;
  const int64_t begin = layer * rows() * width_;
  if (format_.eight_bits) {
    sequence.k = {nullptr, tokens, width_};
    sequence.v = {nullptr, tokens, width_};
    sequence.k8 = {keys_.bytes.data() + begin, keys_.scales.data() + begin / head_dim_};
    sequence.v8 = {values_.bytes.data() + begin, values_.scales.data() + begin / head_dim_};
  } else {
    sequence.k = {keys_.floats.data() + begin, tokens, width_};
    sequence.v = {values_.floats.data() + begin, tokens, width_};
  }
}

}  // namespace twell
