// SPDX-License-Identifier: Apache-2.0
// Attention forward: tiles of keys, softmax with a running maximum and sum, merged if the keys were
// split.
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

constexpr int64_t kFewRows = 2;  // up to this many per key/value head use dot_scores

// The softmax of `rows` query rows over the keys so far; softmaxes of disjoint keys can be merged.
template <typename T>
struct RunningSoftmax {
  RunningSoftmax(const AttentionShape& shape, int64_t rows, T* base)
      : out(base), max(out + rows * padded(shape.head_dim)), sum(max + rows) {}
  static int64_t size(const AttentionShape& shape, int64_t rows) {
    return rows * (padded(shape.head_dim) + 2);
  }

  T* out;  // [rows, padded hd], not yet divided by sum
  T* max;  // [rows] of the scores; -infinity where there was no key yet
  T* sum;  // [rows] of exp(score - max)
};

// Working memory of one item with `rows` query rows.
struct ForwardScratch {
  ForwardScratch(const AttentionShape& shape, int64_t rows, float* base)
      : width(padded(shape.head_dim)),
        keys(base),
        values(keys + width * kTileKeys),
        scores(values + kTileKeys * width),
        q(scores + kStripRows * kTileKeys),
        softmax(shape, rows, q + rows * width) {}
  static int64_t size(const AttentionShape& shape, int64_t rows) {
    return (2 * kTileKeys + rows) * padded(shape.head_dim) + kStripRows * kTileKeys +
           RunningSoftmax<float>::size(shape, rows);
  }

  int64_t width;  // head_dim, padded
  float* keys;    // [hd, kTileKeys] transposed; or [kTileKeys, width], when they were in 8 bits
  float* values;  // [kTileKeys, width], when they need padding or were in 8 bits
  float* scores;  // [kStripRows, kTileKeys]
  float* q;       // [rows, width], times the softmax scale
  RunningSoftmax<float> softmax;
};

// The query rows of an item and their order: all rows of a key/value head, then the next one's.
struct ItemRows {
  ItemRows(const AttentionForward& p, const Item& item)
      : group(p.shape.heads / p.shape.kv_heads),
        per_head(item.count * group),
        count(item.kv_heads * per_head),
        first_query(p.sequences[static_cast<size_t>(item.sequence)].q_begin + item.begin),
        first_head(item.kv_head * group) {}
  int64_t query(int64_t row) const { return first_query + row % per_head / group; }
  int64_t head(int64_t row) const { return first_head + row / per_head * group + row % group; }

  int64_t group;     // query heads of a key/value head
  int64_t per_head;  // rows of a key/value head
  int64_t count;
  int64_t first_query, first_head;
};

}  // namespace twell::attention
#endif

HWY_BEFORE_NAMESPACE();
namespace twell::attention {
namespace HWY_NAMESPACE {
namespace {

// Turns scores [whole vectors of n] into exp(score - max) with the row's running max, and those
// past n into zero. Returns the factor by which the row's earlier output and sum shrink.
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

// scores [keys] = <k[j], q>, for the one or two rows of a decoding step, where packing the keys
// would cost more than it saves.
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

// Keys and values of one key/value head, in runs of `run` rows that lie one after the other in
// memory; the last run may be shorter.
struct KeyTile {
  int64_t count;  // keys, at most kTileKeys
  int64_t run;    // kTileKeys, unless the keys are in smaller blocks
  int64_t hd;
  int64_t k_stride, v_stride;
  const float* keys[kTileRuns];    // [run, hd] each
  const float* values[kTileRuns];  // [run, padded hd] each
  bool packed;                     // the keys are in the scratch too, transposed
};

HWY_INLINE KeyTile key_tile(const AttentionSequence& s, int64_t begin, int64_t count, int64_t at,
                            int64_t hd, bool packed, const ForwardScratch& w) {
  KeyTile tile;
  tile.count = count;
  tile.run = s.blocks == nullptr ? kTileKeys : std::min(kTileKeys, s.block_rows);
  tile.hd = hd;
  tile.k_stride = s.k.stride;
  tile.packed = packed;
  for (int64_t i = 0; i * tile.run < count; ++i) {
    const int64_t first = i * tile.run, rows = std::min(tile.run, count - first);
    int64_t row = begin + first;
    if (s.blocks != nullptr) row = s.blocks[row / s.block_rows] * s.block_rows + row % s.block_rows;
    float* const value_rows = w.values + first * w.width;
    if (s.k8.data == nullptr) {
      tile.keys[i] = s.k.row(row) + at;
    } else {
      // Packed keys leave room where the values will be.
      float* const key_rows = packed ? value_rows : w.keys + first * w.width;
      expand_rows(s.k8, row, rows, s.k.cols, at, hd, key_rows);
      tile.keys[i] = key_rows;
      tile.k_stride = w.width;
    }
    if (packed) {
      const int64_t end = first + rows == count ? kTileKeys - first : rows;
      pack_transposed(tile.keys[i], tile.k_stride, rows, hd, w.keys + first, end);
    }
    Tile values{value_rows, w.width};
    if (s.v8.data == nullptr) {
      values = padded_tile(s.v.row(row) + at, s.v.stride, rows, hd, value_rows);
    } else {
      expand_rows(s.v8, row, rows, s.v.cols, at, hd, value_rows);
    }
    tile.values[i] = values.data;
    tile.v_stride = values.stride;
  }
  return tile;
}

// Computes rows [row, row + rows) of the item against the tile, of which each sees a key at least.
HWY_INLINE void forward_strip(const ForwardScratch& w, const KeyTile& tile,
                              const CausalTile& causal, int64_t begin, int64_t first,
                              int64_t rows) {
  const int64_t width = w.width, row = begin + first, visible = causal.visible(first + rows - 1);
  const float* q = w.q + row * width;
  if (tile.packed) {
    multiply_strip<false>({q, width, 1}, w.keys, kTileKeys, w.scores, kTileKeys, rows,
                          whole_vectors(visible), tile.hd);
  }
  for (int64_t i = 0; i < rows; ++i) {
    float* scores = w.scores + i * kTileKeys;
    const int64_t keys = causal.visible(first + i);
    for (int64_t j = 0; !tile.packed && j < keys; j += tile.run) {
      const int64_t some = std::min(tile.run, keys - j);
      dot_scores(q + i * width, {tile.keys[j / tile.run], some, tile.hd, tile.k_stride}, some,
                 scores + j);
    }
    std::fill_n(scores, causal.hidden(first + i), -std::numeric_limits<float>::infinity());
    const float shrink = softmax_row(scores, keys, w.softmax.max[row + i], w.softmax.sum[row + i]);
    if (shrink != 1.0f) scale_row(w.softmax.out + (row + i) * width, shrink, width);
    std::fill(scores + keys, scores + visible, 0.0f);
  }
  for (int64_t j = 0; j < visible; j += tile.run) {
    multiply_strip<true>({w.scores + j, kTileKeys, 1}, tile.values[j / tile.run], tile.v_stride,
                         w.softmax.out + row * width, width, rows, width,
                         std::min(tile.run, visible - j));
  }
}

// Computes those of rows [begin, begin + rows), the rows of the tile's head, that see the tile.
HWY_INLINE void forward_tile(const ForwardScratch& w, const KeyTile& tile, const CausalTile& causal,
                             int64_t begin, int64_t rows) {
  const int64_t end = causal.end_row(rows);
  for (int64_t row = causal.first_row(0); row < end; row += kStripRows) {
    forward_strip(w, tile, causal, begin, row, std::min(kStripRows, end - row));
  }
}

// Merges `count` softmaxes of one row, `stride` floats apart, and writes the result's row.
HWY_INLINE void finish_row(const AttentionForward& p, const ItemRows& rows, int64_t row,
                           RunningSoftmax<const float> first, int64_t stride, int64_t count) {
  const int64_t hd = p.shape.head_dim;
  float max = first.max[row];
  for (int64_t i = 1; i < count; ++i) max = std::max(max, first.max[row + i * stride]);
  const auto weight = [&](int64_t i) { return std::exp(first.max[row + i * stride] - max); };
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += weight(i) * first.sum[row + i * stride];
  float* const out = p.out.row(rows.query(row)) + rows.head(row) * hd;
  for (int64_t i = 0; i < count; ++i) {
    add_scaled(first.out + row * padded(hd) + i * stride, weight(i) / sum, hd, /*add=*/i > 0, out);
  }
  if (p.logsumexp != nullptr) {
    p.logsumexp[rows.query(row) * p.shape.heads + rows.head(row)] = max + std::log(sum);
  }
}

}  // namespace

void finish_rows(const AttentionForward& p, const Item& item, const float* parts) {
  const ItemRows rows(p, item);
  const int64_t stride = RunningSoftmax<float>::size(p.shape, rows.count);
  for (int64_t row = 0; row < rows.count; ++row) {
    finish_row(p, rows, row, {p.shape, rows.count, parts}, stride, item.parts);
  }
}

void forward_rows(const AttentionForward& p, const Item& item, float* partial, float* scratch) {
  const AttentionSequence& s = p.sequences[static_cast<size_t>(item.sequence)];
  const int64_t hd = p.shape.head_dim;
  const ItemRows rows(p, item);
  ForwardScratch w(p.shape, rows.count, scratch);
  if (partial != nullptr) w.softmax = {p.shape, rows.count, partial};
  const int64_t width = w.width;
  const float scale = softmax_scale(p.shape);
  for (int64_t row = 0; row < rows.count; ++row) {
    pack_row(p.q.row(rows.query(row)) + rows.head(row) * hd, hd, scale, w.q + row * width);
  }
  std::fill_n(w.softmax.out, rows.count * width, 0.0f);
  std::fill_n(w.softmax.max, rows.count, -std::numeric_limits<float>::infinity());
  std::fill_n(w.softmax.sum, rows.count, 0.0f);

  // The outer loop is over tiles of keys, so that a decoding step reads the cache in order.
  const int64_t first_keys = s.k.rows - s.q_len + item.begin + 1;  // visible to the first query
  const int64_t all_keys = first_keys + item.count - 1;
  const int64_t from = item.first_key + item.part * kSplitKeys;
  const int64_t end = item.part + 1 < item.parts ? from + kSplitKeys : all_keys;
  // The first tile with a key that the first query sees; tiles begin at multiples of kTileKeys.
  const int64_t seen = first_visible_key(p.shape, first_keys - 1) / kTileKeys * kTileKeys;
  const bool packed = s.q_len * rows.group > kFewRows;
  for (int64_t tile = std::max(from, seen); tile < end; tile += kTileKeys) {
    const int64_t count = std::min(kTileKeys, end - tile);
    for (int64_t kv = 0; kv < item.kv_heads; ++kv) {
      const int64_t at = (item.kv_head + kv) * hd;
      forward_tile(w, key_tile(s, tile, count, at, hd, packed, w),
                   {count, first_keys - tile, rows.group, p.shape.window}, kv * rows.per_head,
                   rows.per_head);
    }
  }
  if (partial == nullptr) finish_rows(p, item, w.softmax.out);
}

}  // namespace HWY_NAMESPACE
}  // namespace twell::attention
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twell::attention {
HWY_EXPORT(forward_rows);
HWY_EXPORT(finish_rows);

int64_t forward_scratch(const AttentionShape& shape, int64_t rows) {
  return ForwardScratch::size(shape, rows);
}

int64_t partial_size(const AttentionShape& shape, int64_t rows) {
  return RunningSoftmax<float>::size(shape, rows);
}

void forward_item(const AttentionForward& problem, const Item& item, float* partial,
                  float* scratch) {
  HWY_DYNAMIC_DISPATCH(forward_rows)(problem, item, partial, scratch);
}

void merge_partials(const AttentionForward& problem, const Item& item, const float* partials) {
  HWY_DYNAMIC_DISPATCH(finish_rows)(problem, item, partials);
}

}  // namespace twell::attention
#endif  // HWY_ONCE
