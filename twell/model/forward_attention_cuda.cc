// SPDX-License-Identifier: Apache-2.0
// Attention of a forward's layers: over its own keys and values, a cache in bf16, or one in 8 bits,
// which prompts read through a copy in bf16.
#include <numeric>
#include <vector>

#include "twell/base/rounding.h"
#include "twell/model/forward_cuda.h"
#include "twell/model/qkv.h"
#include "twell/ops/attention/kv_bytes_cuda.h"

namespace twell {

int64_t ForwardCuda::wide_blocks(const ForwardPlanCuda& plan) {
  if (!plan.eight_bit_cache) return 0;
  return 1 + ceil_div(plan.max_length, kKvBlock) + ceil_div(plan.max_tokens, kKvBlock);
}

int64_t ForwardCuda::wide_bytes(const ModelConfig& config, const ForwardPlanCuda& plan) {
  if (!plan.eight_bit_cache) return 0;
  return wide_blocks(plan) * (4 * kKvBlock * config.kv_width() + 4) + 8 * plan.max_tokens;
}

void ForwardCuda::make_wide_rows() {
  if (!plan_.eight_bit_cache) return;
  const int64_t blocks = wide_blocks(plan_), block_values = kKvBlock * config_.kv_width();
  wide_.blocks = blocks;
  wide_.keys = DeviceBuffer<__nv_bfloat16>(blocks * block_values);
  wide_.values = DeviceBuffer<__nv_bfloat16>(blocks * block_values);
  // Only block 0 is read behind the ends of sequences: other blocks that are read are written
  // whole.
  for (const DeviceBuffer<__nv_bfloat16>* part : {&wide_.keys, &wide_.values}) {
    TWELL_CUDA_CHECK(cudaMemsetAsync(
        part->data(), 0, static_cast<size_t>(block_values) * sizeof(__nv_bfloat16), ctx_.stream()));
  }
  std::vector<int32_t> table(static_cast<size_t>(blocks));
  std::iota(table.begin(), table.end(), 0);
  wide_.table = to_device<int32_t>(table);
  std::vector<int64_t> rows;
  for (int64_t token = 0; token < plan_.max_tokens; ++token) {
    rows.push_back(token * (qkv_width(config_) / config_.kv_width()));
  }
  wide_.qkv_rows = to_device<int64_t>(rows);
}

ForwardCuda::NewRows ForwardCuda::new_rows(int64_t layer) const {
  if (staged_.cache == nullptr) return {};
  if (!eight_bits()) {
    return {staged_.cache->keys(layer), staged_.cache->values(layer),
            batch_.device(staged_.tokens, staged_.sequences).cache_rows};
  }
  __nv_bfloat16* const keys = qkv_.data() + config_.q_width();
  return {keys, keys + config_.kv_width(), wide_.qkv_rows.data()};
}

void ForwardCuda::store_bytes(int64_t layer) const {
  const auto [keys, values, rows] = new_rows(layer);
  TWELL_CUDA_CHECK(launch_kv_store_bytes(
      {.tokens = staged_.tokens,
       .kv_heads = config_.kv_heads,
       .head_dim = config_.head_dim,
       .k = keys,
       .v = values,
       .stride = qkv_width(config_),
       .cache_rows = batch_.device(staged_.tokens, staged_.sequences).cache_rows,
       .keys = staged_.cache->key_bytes(layer),
       .values = staged_.cache->value_bytes(layer)},
      ctx_.stream()));
}

AttentionCuda ForwardCuda::attention_of(int64_t layer, const SequenceGroup& group) const {
  const BatchArrays batch = batch_.device(staged_.tokens, staged_.sequences);
  const KvCacheCuda* const cache = staged_.cache;
  const __nv_bfloat16* const own_keys = qkv_.data() + config_.q_width();
  const int64_t stride = qkv_width(config_);
  return {.heads = config_.heads,
          .kv_heads = config_.kv_heads,
          .head_dim = config_.head_dim,
          .sequences = {.count = group.count,
                        .max_q_len = group.max_q_len,
                        .max_kv_len = group.max_kv_len,
                        .rows = staged_.tokens,
                        .q_begin = batch.q_begin + group.first,
                        .q_len = batch.q_len + group.first,
                        .kv_len = batch.kv_len + group.first,
                        .kv_begin = batch.kv_begin + group.first,
                        .tables = cache == nullptr ? nullptr : cache->tables(),
                        .blocks = cache == nullptr ? 0 : cache->blocks(),
                        .uniform = staged_.uniform,
                        .ragged = group.ragged},
          .q = qkv_.data(),
          .q_stride = stride,
          .k = cache == nullptr ? own_keys : cache->keys(layer),
          .v = cache == nullptr ? own_keys + config_.kv_width() : cache->values(layer),
          .kv_stride = cache == nullptr ? stride : config_.kv_width(),
          .k8 = cache == nullptr ? KvBytes{} : cache->key_bytes(layer),
          .v8 = cache == nullptr ? KvBytes{} : cache->value_bytes(layer),
          .window = config_.window_of(layer),
          .out = attended_.data()};
}

AttentionCuda ForwardCuda::widened(int64_t layer, const SequenceGroup& group) const {
  AttentionCuda problem = attention_of(layer, group);
  AttentionSequencesCuda& sequences = problem.sequences;
  const int64_t* const wide_begin =
      batch_.device(staged_.tokens, staged_.sequences).wide_begin + group.first;
  TWELL_CUDA_CHECK(launch_kv_load_bytes({.sequences = group.count,
                                         .max_kv_len = group.max_kv_len,
                                         .kv_heads = config_.kv_heads,
                                         .head_dim = config_.head_dim,
                                         .kv_len = sequences.kv_len,
                                         .kv_begin = sequences.kv_begin,
                                         .tables = sequences.tables,
                                         .keys = problem.k8,
                                         .values = problem.v8,
                                         .first = wide_begin,
                                         .k = wide_.keys.data(),
                                         .v = wide_.values.data()},
                                        ctx_.stream()));
  sequences.kv_begin = wide_begin;
  sequences.tables = wide_.table.data();
  sequences.blocks = wide_.blocks;
  problem.k = wide_.keys.data();
  problem.v = wide_.values.data();
  problem.k8 = problem.v8 = {};
  sequences.ragged = attention_ragged(ctx_, problem, attention_);
  return problem;
}

void ForwardCuda::attention(int64_t layer) {
  if (eight_bits()) store_bytes(layer);
  for (const SequenceGroup& group : staged_.groups) {
    attention_cuda(ctx_, group.widened ? widened(layer, group) : attention_of(layer, group),
                   attention_);
  }
}

}  // namespace twell
