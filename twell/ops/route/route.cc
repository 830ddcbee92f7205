// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/route/route.h"

#include <algorithm>
#include <bit>

#include "twell/base/rounding.h"

namespace twell::route {
namespace {

// The most sequences that one kernel of all layers decodes faster than a few kernels per layer do.
// 2b with four makes 2,215 tokens/s dense and 2,703 sparse by one, 2,071 and 2,816 by these.
int64_t one_kernel_pays(bool sparse) { return sparse ? 3 : 4; }
// With projections in e4m3. A layer takes some 25 us by one kernel with one sequence and 45 with
// eight (2b); by single ops 35 and 41 (0.5b).
constexpr int64_t kOneKernelInBytes = 4;

// What few kernels take longer than one kernel in the rest of a layer. One sequence, 10% active: D
// 2048 4,481 tokens/s by few and 5,172 by one, where streaming saves 0.8 us; D 4096 1,908 and 1,659
// (9 us); two sequences, D 2048, 8,746 and 7,467 (4 us).
constexpr double kFewKernelsMicros = 2.5;
// The same for one sequence of layers with so many bytes (D 4096, F 11008: 224 MB). There one
// kernel took 9.4 us (3% active) and 13.1 us (10%) a layer longer, 13 of which a second stage
// saves.
constexpr int64_t kWideBytes = 140'000'000;
constexpr double kFewKernelsWideMicros = 9.5;

// With two stages a sparse layer of 224 MB (D 4096, F 11008) takes 13 us less, one of 88 MB (D
// 2560, F 6912) 5 to 6 us less, one of 57 MB (D 2048, F 5632) 1 to 2 us more, because words that
// CTAs exchange wait behind weights (bench/results/2026-11-27-7b-layers-decode.txt).
constexpr int64_t kTwoStageBytes = 70'000'000;

// From so many tokens on a norm is better a kernel of its own.
constexpr int64_t kNormApart = 4;

// From so many tokens on unions are enough smaller that sorting pays.
constexpr int64_t kSortedTokens = 512;

// With fewer tokens, tiles of 256 x 256 leave much of the device idle.
constexpr int64_t kFusedQkv = 1024;

// Fewer queries than a tile of cuDNN has are not worth a plan of their own, which takes 50 ms.
constexpr int64_t kRaggedQueries = 128;

// Splits of a sequence, except of one that needs more, and CTAs wanted on GPUs of any size, which
// bounds the workspace.
constexpr int64_t kMostSplits = 64, kMostCtas = 512;

int64_t most_splits(int64_t max_kv_len) {
  return std::max(std::min(ceil_div(max_kv_len, int64_t{kLeastKeys}), kMostSplits),
                  attention_fewest_splits(max_kv_len));
}

// Reading through a screen is faster up to this share of active neurons.
constexpr double kScreenedShare = 1.0 / 80.0;

}  // namespace

int64_t one_kernel_tokens(const Layers& layers, int64_t layer_count, int64_t most_layers,
                          int64_t most) {
  const bool suits = layers.relu && !layers.qk_norm && !layers.o_bias && !layers.biased &&
                     layer_count <= most_layers;
  return suits ? most : 0;
}

LayersPath layers_path(const Layers& layers, const Batch& batch) {
  if (batch.observed || !batch.cached) return LayersPath::kSingleOps;
  // The kernel of all layers attends to all keys.
  const bool slides = layers.window > 0 && batch.most_keys > layers.window;
  const bool few = !layers.in_bytes && batch.tokens >= 1 && batch.tokens <= layers.norm_tokens &&
                   layers.head_dim % 16 == 0 && !layers.qk_norm && !layers.o_bias;
  if (batch.most_new == 1 && !batch.repeats && batch.tokens <= layers.one_kernel_tokens &&
      !slides) {
    const bool streams = layers.stream_tokens > 0 && batch.tokens >= layers.stream_tokens;
    const bool pays = layers.in_bytes
                          ? batch.tokens <= kOneKernelInBytes
                          : (batch.tokens <= one_kernel_pays(layers.sparse) && !streams) || !few;
    if (pays || batch.one_kernel) return LayersPath::kOneKernel;
  }
  return few ? LayersPath::kFewKernels : LayersPath::kSingleOps;
}

bool stream_pays(double decode_rows_us, double row_stream_us, bool screened, int64_t tokens,
                 int64_t layer_bytes) {
  const bool wide = tokens == 1 && layer_bytes >= kWideBytes;
  const double needed = wide ? kFewKernelsWideMicros : kFewKernelsMicros;
  return !screened && decode_rows_us - row_stream_us > needed;
}

int sparse_requests(int64_t layer_bytes) { return layer_bytes >= kTwoStageBytes ? 2 : 1; }

bool gate_screen_pays(double nnz_per_token, int64_t ffn) {
  return nnz_per_token <= kScreenedShare * static_cast<double>(ffn);
}

bool norm_apart(int64_t tokens) { return tokens >= kNormApart; }

bool sorts_rows_by_id(int64_t tokens, bool dense) { return tokens >= kSortedTokens && !dense; }

LinearKernel linear_kernel(const Device& device, int64_t rows, int64_t cols, int64_t row_tokens) {
  if (rows <= std::min(kSkinnyRows, row_tokens)) return LinearKernel::kSkinny;
  // With more than two tiles of 64 rows of w per SM cuBLASLt is faster.
  const bool batch = rows <= kBatchRows && cols % 8 == 0 && device.hopper &&
                     cols <= int64_t{128} * device.multiprocessors;
  return batch ? LinearKernel::kBatch : LinearKernel::kGemm;
}

int64_t padded_rows(int64_t tokens) {
  if (tokens <= kSkinnyRows) return tokens;
  return round_up(tokens, tokens <= kRowStep ? int64_t{16} : kRowStep);
}

bool fused_qkv_pays(int64_t tokens) { return tokens >= kFusedQkv; }

GemmRules gemm_rules(int64_t rows) {
  if (rows >= 2048) return {.proven_tiles = true};
  if (rows < 64) return {};
  return {.follows_rules = true,
          .medium_tiles = rows >= 256,
          .full_wave = rows <= 72,
          .few_clusters_of_four = rows == 64};
}

bool gemm_bits_known(int64_t rows, int64_t cols, int64_t inner, bool trans_a) {
  const auto known = [](int64_t size, int64_t multiple) {
    return size >= 512 && size % multiple == 0;
  };
  return known(inner, 256) && known(cols, 64) && (trans_a ? known(rows, 64) : rows >= 64);
}

AttentionKernel attention_kernel(int64_t max_q_len, bool paged) {
  return max_q_len == 1 && paged ? AttentionKernel::kDecode : AttentionKernel::kOther;
}

bool ragged_attention_pays(int64_t max_q_len) { return max_q_len >= kRaggedQueries; }

int64_t attention_ctas(const AttentionHeads& h) {
  return h.kv_heads * ceil_div(h.heads / h.kv_heads, int64_t{kMostQueries});
}

int64_t attention_fewest_splits(int64_t max_kv_len) {
  return ceil_div(max_kv_len, int64_t{kMostKeys});
}

AttentionDivision attention_division(const AttentionHeads& h, int64_t sequences, int64_t max_kv_len,
                                     int64_t multiprocessors) {
  const int64_t ctas = sequences * attention_ctas(h);
  // With heads of more than 64 columns an SM's registers hold one CTA of the most warps.
  const int64_t ctas_per_sm = h.head_dim <= 64 ? 2 : 1;
  const int64_t wanted = std::min(ctas_per_sm * multiprocessors, kMostCtas) / ctas;
  const int64_t splits =
      std::clamp(wanted, attention_fewest_splits(max_kv_len), most_splits(max_kv_len));
  // The fewer CTAs there are, the more warps each has; in 8 bits at least 4, because a load brings
  // half as many bytes.
  const int64_t warps_per_cta = int64_t{kWarpsPerSm} * multiprocessors / (ctas * splits);
  const int64_t warps =
      std::clamp<int64_t>(warps_per_cta, h.eight_bits ? 4 : 1, attention_most_warps(h.head_dim));
  return {.splits = splits,
          .warps = static_cast<int>(std::bit_floor(static_cast<uint64_t>(warps))),
          .loads = warps_per_cta == 0 ? 4 : 8};
}

int64_t attention_partial_splits(int64_t max_sequences, int64_t max_kv_len) {
  const int64_t most = most_splits(max_kv_len), fewest = attention_fewest_splits(max_kv_len);
  if (most == 1) return 0;
  // More splits than a sequence needs are made only while all of them together are few.
  const int64_t needed = fewest == 1 ? 0 : max_sequences * fewest;
  return std::min(max_sequences * most, std::max(needed, kMostCtas));
}

}  // namespace twell::route
