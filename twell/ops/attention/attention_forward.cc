// SPDX-License-Identifier: Apache-2.0
// Attention forward: tiles of keys, softmax with a running maximum and sum.
#include <algorithm>
#include <cmath>
#include <limits>

#include "twell/ops/attention/attention_items.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "twell/ops/attention/attention_forward.cc"
#include "hwy/foreach_target.h"
#include "twell/ops/attention/attention_tiles-inl.h"

#ifndef TWELL_OPS_ATTENTION_FORWARD_SCRATCH_
#define TWELL_OPS_ATTENTION_FORWARD_SCRATCH_
namespace twell::attention {

constexpr int64_t kFewRows = 2;  // of a sequence and key/value head, for dot_scores

// Working memory of one item with `rows` query rows.
struct ForwardScratch {
  ForwardScratch(const AttentionShape& shape, int64_t rows, float* base)
      : width(padded(shape.head_dim)),
        keys(base),
        values(keys + width * kTileKeys),
        scores(values + kTileKeys * width),
        q(scores + kStripRows * kTileKeys),
        out(q + rows * width),
        max(out + rows * width),
        sum(max + rows) {}
  static int64_t size(const AttentionShape& shape, int64_t rows) {
    return 2 * (kTileKeys + rows) * padded(shape.head_dim) + kStripRows * kTileKeys + 2 * rows;
  }

  int64_t width;  // head_dim, padded
  float* keys;    // [hd, kTileKeys] transposed
  float* values;  // [kTileKeys, width], when they need padding
  float* scores;  // [kStripRows, kTileKeys]
  float* q;       // [rows, width], times the softmax scale
  float* out;     // [rows, width], not yet divided by sum
  float* max;     // [rows] of the scores so far
  float* sum;     // [rows] of exp(score - max)
};

}  // namespace twell::attention
#endif

HWY_BEFORE_NAMESPACE();
namespace twell::attention {
namespace HWY_NAMESPACE {
namespace {

// scores [whole vectors of n] become exp(score - max) with the running max of the row, those past n
// zero. Returns by how much the row's earlier output and sum shrink.
HWY_INLINE float softmax_row(float* scores, int64_t n, float& running_max, float& running_sum) {
  const Tag d;
  const int64_t whole = n / lanes() * lanes();
  const auto valid = hn::FirstN(d, static_cast<size_t>(n - whole));
  Vec max_v = hn::Set(d, running_max);
  for (int64_t j = 0; j < whole; j += lanes()) max_v = hn::Max(max_v, hn::LoadU(d, scores + j));
  if (whole < n) {
    max_v = hn::IfThenElse(valid, hn::Max(max_v, hn::LoadU(d, scores + whole)), max_v);
  }
  const float max = hn::GetLane(hn::MaxOfLanes(d, max_v));
  max_v = hn::Set(d, max);
  Vec sum_v = hn::Zero(d);
  for (int64_t j = 0; j < whole; j += lanes()) {
    const Vec weight = hn::Exp(d, hn::Sub(hn::LoadU(d, scores + j), max_v));
    hn::StoreU(weight, d, scores + j);
    sum_v = hn::Add(sum_v, weight);
  }
  if (whole < n) {
    const Vec weight =
        hn::IfThenElseZero(valid, hn::Exp(d, hn::Sub(hn::LoadU(d, scores + whole), max_v)));
    hn::StoreU(weight, d, scores + whole);
    sum_v = hn::Add(sum_v, weight);
  }
  const float shrink = running_max == max ? 1.0f : std::exp(running_max - max);
  running_max = max;
  running_sum = running_sum * shrink + hn::GetLane(hn::SumOfLanes(d, sum_v));
  return shrink;
}

// scores [keys] = <k[j], q>: for the row or two of a decoding step, where packing the keys would
// cost more than it saves.
HWY_INLINE void dot_scores(const float* q, ConstMatrixF k, int64_t keys, float* scores) {
  const Tag d;
  const int64_t whole = k.cols / lanes() * lanes();
  int64_t j = 0;
  for (; j + 4 <= keys; j += 4) {
    const float* key = k.row(j);
    Vec s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
    for (int64_t c = 0; c < whole; c += lanes()) {
      const Vec v = hn::LoadU(d, q + c);
      s0 = hn::MulAdd(v, hn::LoadU(d, key + c), s0);
      s1 = hn::MulAdd(v, hn::LoadU(d, key + k.stride + c), s1);
      s2 = hn::MulAdd(v, hn::LoadU(d, key + 2 * k.stride + c), s2);
      s3 = hn::MulAdd(v, hn::LoadU(d, key + 3 * k.stride + c), s3);
    }
    scores[j] = hn::GetLane(hn::SumOfLanes(d, s0));
    scores[j + 1] = hn::GetLane(hn::SumOfLanes(d, s1));
    scores[j + 2] = hn::GetLane(hn::SumOfLanes(d, s2));
    scores[j + 3] = hn::GetLane(hn::SumOfLanes(d, s3));
    for (int64_t i = 0; i < 4; ++i) {
      for (int64_t c = whole; c < k.cols; ++c) scores[j + i] += q[c] * k(j + i, c);
    }
  }
  for (; j < keys; ++j) scores[j] = dot_row(q, k.row(j), k.cols);
}

// Keys and values of one key/value head.
struct KeyTile {
  ConstMatrixF keys;  // [<= kTileKeys, hd]
  bool packed;        // the keys are in the scratch too, transposed
  Tile values;        // [<= kTileKeys, padded hd]
};

// Rows [row, row + rows) of the item against the tile; keys[i] > 0 of it are visible to row i.
HWY_INLINE void forward_strip(const ForwardScratch& w, const KeyTile& tile, int64_t row,
                              int64_t rows, const int64_t* keys) {
  const int64_t width = w.width, visible = keys[rows - 1];
  const float* q = w.q + row * width;
  if (tile.packed) {
    multiply_strip<false>({q, width, 1}, w.keys, kTileKeys, w.scores, kTileKeys, rows,
                          whole_vectors(visible), tile.keys.cols);
  }
  for (int64_t i = 0; i < rows; ++i) {
    float* scores = w.scores + i * kTileKeys;
    if (!tile.packed) dot_scores(q + i * width, tile.keys, keys[i], scores);
    const float shrink = softmax_row(scores, keys[i], w.max[row + i], w.sum[row + i]);
    if (shrink != 1.0f) scale_row(w.out + (row + i) * width, shrink, width);
    std::fill(scores + keys[i], scores + visible, 0.0f);
  }
  multiply_strip<true>({w.scores, kTileKeys, 1}, tile.values.data, tile.values.stride,
                       w.out + row * width, width, rows, width, visible);
}

// Rows [begin, begin + rows), those of the tile's head; row i of them sees first_keys + i / group
// keys of the tile.
HWY_INLINE void forward_tile(const ForwardScratch& w, const KeyTile& tile, int64_t group,
                             int64_t begin, int64_t rows, int64_t first_keys) {
  // Rows before this see none of the tile.
  const int64_t start = std::max<int64_t>(0, (1 - first_keys) * group);
  for (int64_t row = start; row < rows; row += kStripRows) {
    const int64_t strip = std::min(kStripRows, rows - row);
    int64_t keys[kStripRows];
    for (int64_t i = 0; i < strip; ++i) {
      keys[i] = std::min(tile.keys.rows, first_keys + (row + i) / group);
    }
    forward_strip(w, tile, begin + row, strip, keys);
  }
}

}  // namespace

void forward_rows(const AttentionForward& p, const Item& item, float* scratch) {
  const AttentionSequence& s = p.sequences[static_cast<size_t>(item.sequence)];
  const int64_t hd = p.shape.head_dim, group = p.shape.heads / p.shape.kv_heads;
  const int64_t head_rows = item.count * group, rows = item.kv_heads * head_rows;
  const ForwardScratch w(p.shape, rows, scratch);
  const int64_t width = w.width;
  const float scale = softmax_scale(p.shape);
  const auto query = [&](int64_t row) { return s.q_begin + item.begin + row % head_rows / group; };
  const auto head = [&](int64_t row) {
    return (item.kv_head + row / head_rows) * group + row % group;
  };
  for (int64_t row = 0; row < rows; ++row) {
    pack_row(p.q.row(query(row)) + head(row) * hd, hd, scale, w.q + row * width);
  }
  std::fill_n(w.out, rows * width, 0.0f);
  std::fill_n(w.max, rows, -std::numeric_limits<float>::infinity());
  std::fill_n(w.sum, rows, 0.0f);

  // Tiles of keys outside, heads inside: a decoding step then reads the cache in order.
  const int64_t first_keys = s.k.rows - s.q_len + item.begin + 1;  // visible to the first query
  const int64_t all_keys = first_keys + item.count - 1;
  const bool packed = s.q_len * group > kFewRows;
  for (int64_t tile = 0; tile < all_keys; tile += kTileKeys) {
    const int64_t count = std::min(kTileKeys, all_keys - tile);
    for (int64_t kv = 0; kv < item.kv_heads; ++kv) {
      const int64_t at = (item.kv_head + kv) * hd;
      const ConstMatrixF keys(s.k.row(tile) + at, count, hd, s.k.stride);
      if (packed) pack_transposed(keys.data, keys.stride, count, hd, w.keys);
      const Tile values = padded_tile(s.v.row(tile) + at, s.v.stride, count, hd, w.values);
      forward_tile(w, {keys, packed, values}, group, kv * head_rows, head_rows, first_keys - tile);
    }
  }

  for (int64_t row = 0; row < rows; ++row) {
    scale_row(w.out + row * width, 1.0f / w.sum[row], width);
    std::copy_n(w.out + row * width, hd, p.out.row(query(row)) + head(row) * hd);
    if (p.logsumexp != nullptr) {
      p.logsumexp[query(row) * p.shape.heads + head(row)] = w.max[row] + std::log(w.sum[row]);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace twell::attention
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twell::attention {
HWY_EXPORT(forward_rows);

int64_t forward_scratch(const AttentionShape& shape, int64_t rows) {
  return ForwardScratch::size(shape, rows);
}

void forward_item(const AttentionForward& problem, const Item& item, float* scratch) {
  HWY_DYNAMIC_DISPATCH(forward_rows)(problem, item, scratch);
}

}  // namespace twell::attention
#endif  // HWY_ONCE
