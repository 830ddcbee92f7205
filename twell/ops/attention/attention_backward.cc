// SPDX-License-Identifier: Apache-2.0
// Attention backward: for every tile of keys, the weights and their gradient are recomputed from
// logsumexp, one tile of query rows at a time.
//   P = exp(S - logsumexp)   dP = dOut V^T   dS = P * (dP - delta)   delta = <out, dOut>
//   dV = P^T dOut            dK = dS^T (scale Q)                     dQ = scale (dS K)
#include <algorithm>

#include "twell/ops/attention/attention_items.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "twell/ops/attention/attention_backward.cc"
#include "hwy/foreach_target.h"
#include "twell/ops/attention/attention_tiles-inl.h"

#ifndef TWELL_OPS_ATTENTION_BACKWARD_SCRATCH_
#define TWELL_OPS_ATTENTION_BACKWARD_SCRATCH_
namespace twell::attention {

constexpr int64_t kTileRows = 64;  // query rows whose weights are held at a time

// Working memory of one item with `rows` query rows.
struct BackwardScratch {
  BackwardScratch(const AttentionShape& shape, int64_t rows, float* base)
      : width(padded(shape.head_dim)),
        keys_t(base),
        values_t(keys_t + kTileKeys * width),
        keys(values_t + kTileKeys * width),
        d_keys(keys + kTileKeys * width),
        d_values(d_keys + kTileKeys * width),
        weights(d_values + kTileKeys * width),
        d_scores(weights + kTileRows * kTileKeys),
        q(d_scores + kTileRows * kTileKeys),
        d_out(q + rows * width),
        logsumexp(d_out + rows * width),
        delta(logsumexp + rows) {}
  static int64_t size(const AttentionShape& shape, int64_t rows) {
    return (5 * kTileKeys + 2 * rows) * padded(shape.head_dim) + 2 * kTileRows * kTileKeys +
           2 * rows;
  }

  int64_t width;     // head_dim, padded
  float* keys_t;     // [hd, kTileKeys]
  float* values_t;   // [hd, kTileKeys]
  float* keys;       // [kTileKeys, width], when they need padding
  float* d_keys;     // [kTileKeys, width]
  float* d_values;   // [kTileKeys, width]
  float* weights;    // [kTileRows, kTileKeys] P
  float* d_scores;   // [kTileRows, kTileKeys] dP, then dS
  float* q;          // [rows, width], times the softmax scale
  float* d_out;      // [rows, width]
  float* logsumexp;  // [rows]
  float* delta;      // [rows]
};

}  // namespace twell::attention
#endif

HWY_BEFORE_NAMESPACE();
namespace twell::attention {
namespace HWY_NAMESPACE {
namespace {

// Turns weights [hidden, visible) from scores into P, and d_scores from dP into dS; zeros in the
// rest of the tile.
HWY_INLINE void score_gradient_row(float* weights, float* d_scores, int64_t hidden, int64_t visible,
                                   float logsumexp, float delta) {
  const Tag d;
  const Vec logsumexp_v = hn::Set(d, logsumexp), delta_v = hn::Set(d, delta);
  for (int64_t j = 0; j < visible; j += lanes()) {
    const Vec weight = hn::Exp(d, hn::Sub(hn::LoadU(d, weights + j), logsumexp_v));
    const Vec gradient = hn::Mul(weight, hn::Sub(hn::LoadU(d, d_scores + j), delta_v));
    hn::StoreU(weight, d, weights + j);
    hn::StoreU(gradient, d, d_scores + j);
  }
  std::fill_n(weights, hidden, 0.0f);
  std::fill_n(d_scores, hidden, 0.0f);
  std::fill(weights + visible, weights + kTileKeys, 0.0f);
  std::fill(d_scores + visible, d_scores + kTileKeys, 0.0f);
}

// Adds the contribution of query rows [row, row + rows) to d_keys and d_values, and that of the
// tile of keys to the rows' d_q.
HWY_INLINE void backward_tile(const BackwardScratch& w, Tile keys, int64_t head_dim,
                              const CausalTile& causal, int64_t row, int64_t rows, float* d_q) {
  const int64_t width = w.width;
  for (int64_t i = 0; i < rows; i += kStripRows) {
    const int64_t strip = std::min(kStripRows, rows - i), at = (row + i) * width;
    const int64_t cols = whole_vectors(causal.visible(row + i + strip - 1));
    float* weights = w.weights + i * kTileKeys;
    float* d_scores = w.d_scores + i * kTileKeys;
    multiply_strip<false>({w.q + at, width, 1}, w.keys_t, kTileKeys, weights, kTileKeys, strip,
                          cols, head_dim);
    multiply_strip<false>({w.d_out + at, width, 1}, w.values_t, kTileKeys, d_scores, kTileKeys,
                          strip, cols, head_dim);
    for (int64_t r = 0; r < strip; ++r) {
      score_gradient_row(weights + r * kTileKeys, d_scores + r * kTileKeys,
                         causal.hidden(row + i + r), causal.visible(row + i + r),
                         w.logsumexp[row + i + r], w.delta[row + i + r]);
    }
    multiply_strip<true>({d_scores, kTileKeys, 1}, keys.data, keys.stride, d_q + at, width, strip,
                         width, causal.visible(row + i + strip - 1));
  }
  for (int64_t j = 0; j < causal.keys; j += kStripRows) {
    const int64_t strip = std::min(kStripRows, causal.keys - j);
    const int64_t start = std::max<int64_t>(0, causal.first_row(j) - row);
    if (start >= rows) break;
    const int64_t at = (row + start) * width, from = start * kTileKeys + j;
    multiply_strip<true>({w.weights + from, 1, kTileKeys}, w.d_out + at, width,
                         w.d_values + j * width, width, strip, width, rows - start);
    multiply_strip<true>({w.d_scores + from, 1, kTileKeys}, w.q + at, width, w.d_keys + j * width,
                         width, strip, width, rows - start);
  }
}

}  // namespace

void backward_keys(const AttentionBackward& p, const Item& item, float* d_q, float* scratch) {
  const AttentionSequence& s = p.sequences[static_cast<size_t>(item.sequence)];
  const int64_t hd = p.shape.head_dim, group = p.shape.heads / p.shape.kv_heads;
  const int64_t rows = s.q_len * group, at = item.kv_head * hd;
  const BackwardScratch w(p.shape, rows, scratch);
  const int64_t width = w.width, first_row = item.begin * group;
  const float scale = softmax_scale(p.shape);
  for (int64_t row = first_row; row < rows; ++row) {
    const int64_t m = s.q_begin + row / group, head = item.kv_head * group + row % group;
    pack_row(p.q.row(m) + head * hd, hd, scale, w.q + row * width);
    pack_row(p.d_out.row(m) + head * hd, hd, 1.0f, w.d_out + row * width);
    w.logsumexp[row] = p.logsumexp[m * p.shape.heads + head];
    w.delta[row] = dot_row(p.out.row(m) + head * hd, p.d_out.row(m) + head * hd, hd);
  }
  std::fill_n(d_q, rows * width, 0.0f);

  for (int64_t tile = item.begin; tile < item.begin + item.count; tile += kTileKeys) {
    const int64_t count = std::min(kTileKeys, item.begin + item.count - tile);
    pack_transposed(s.k.row(tile) + at, s.k.stride, count, hd, w.keys_t);
    pack_transposed(s.v.row(tile) + at, s.v.stride, count, hd, w.values_t);
    const Tile keys = padded_tile(s.k.row(tile) + at, s.k.stride, count, hd, w.keys);
    std::fill_n(w.d_keys, kTileKeys * width, 0.0f);
    std::fill_n(w.d_values, kTileKeys * width, 0.0f);
    const CausalTile causal{count, 1 - tile, group, p.shape.window};
    const int64_t end = causal.end_row(rows);
    for (int64_t row = tile * group; row < end; row += kTileRows) {
      backward_tile(w, keys, hd, causal, row, std::min(kTileRows, end - row), d_q);
    }
    for (int64_t j = 0; j < count; ++j) {
      std::copy_n(w.d_keys + j * width, hd, p.d_k.row(s.q_begin + tile + j) + at);
      std::copy_n(w.d_values + j * width, hd, p.d_v.row(s.q_begin + tile + j) + at);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace twell::attention
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twell::attention {
HWY_EXPORT(backward_keys);

int64_t backward_scratch(const AttentionShape& shape, int64_t rows) {
  return BackwardScratch::size(shape, rows);
}

void backward_item(const AttentionBackward& problem, const Item& item, float* d_q, float* scratch) {
  HWY_DYNAMIC_DISPATCH(backward_keys)(problem, item, d_q, scratch);
}

}  // namespace twell::attention
#endif  // HWY_ONCE
