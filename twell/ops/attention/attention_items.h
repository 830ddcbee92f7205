// SPDX-License-Identifier: Apache-2.0
// How an attention problem is cut into work items. Internal to this folder.
//
// An item is one (sequence, key/value head): all query heads of its group share the packed keys.
// Its query rows are numbered r = query * group + head within the group, so each row sees at least
// the keys of the row before it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "twell/ops/attention/attention.h"

namespace twell::attention {

// Keys in a tile. A transposed key tile and a value tile of 64 x 64 floats fill 32 of the 48 KiB of
// a current L1 cache.
inline constexpr int64_t kTileKeys = 64;
// Pieces of memory in which the keys of a tile may lie: blocks have at least 16 rows.
inline constexpr int64_t kTileRuns = 4;
// Query rows multiplied at a time; see the register budget in attention_tiles-inl.h.
inline constexpr int64_t kStripRows = 4;
// Rows of packed operands are padded with zeros to a multiple of the widest vector, 16 floats.
inline constexpr int64_t kPad = 16;

// A few query rows on many keys, as in decoding, leave threads idle if only heads are distributed.
// So for up to kSplitRows rows the keys are split too, always at multiples of kSplitKeys: the
// result depends on the shape alone, not on the threads.
inline constexpr int64_t kSplitKeys = 4 * kTileKeys;
inline constexpr int64_t kSplitRows = 64;

inline int64_t padded(int64_t head_dim) { return (head_dim + kPad - 1) / kPad * kPad; }
inline float softmax_scale(const AttentionShape& shape) {
  return 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
}

struct Item {
  int64_t sequence;
  int64_t kv_head, kv_heads;  // the first key/value head and how many
  int64_t begin, count;       // queries (forward) or keys (backward) of the sequence
  double cost;                // multiply-adds
  // Forward: the item is one of `parts` on the same queries, and covers the keys from first_key +
  // part * kSplitKeys on. No query sees a key before first_key, a multiple of kSplitKeys.
  int64_t first_key = 0, part = 0, parts = 1;
};

// The first key that a query at this position sees.
inline int64_t first_visible_key(const AttentionShape& shape, int64_t position) {
  return shape.window == 0 ? 0 : std::max<int64_t>(0, position + 1 - shape.window);
}

// Query-key pairs of `count` queries from `begin` on.
inline double causal_pairs(const AttentionShape& shape, const AttentionSequence& s, int64_t begin,
                           int64_t count) {
  const int64_t position = s.k.rows - s.q_len + begin;
  const double keys = static_cast<double>(position + 1 - first_visible_key(shape, position));
  // Until the window is full, each query sees one key more than the one before it.
  const double more = first_visible_key(shape, position + count) > 0 ? 0.0 : 0.5;
  return static_cast<double>(count) * (keys + more * static_cast<double>(count - 1));
}

// Calls fn(item, thread); every thread gets a contiguous run of items of about the same cost.
template <typename Fn>
void for_each_item(Context& ctx, std::span<const Item> items, const Fn& fn) {
  double total = 0;
  for (const Item& item : items) total += item.cost;
  // Waking a thread pays off from about 64 Ki multiply-adds on, some ten microseconds.
  const double parts = std::clamp(total * 0x1p-16, 1.0, static_cast<double>(ctx.threads()));
  const int64_t threads = static_cast<int64_t>(parts);
  ctx.parallel_for(threads, 1, [&](int64_t first, int64_t last, int thread) {
    double before = 0;
    for (const Item& item : items) {
      const double middle = before + item.cost / 2;
      before += item.cost;
      const int64_t part = static_cast<int64_t>(middle / total * static_cast<double>(threads));
      if (part >= first && part < last) fn(item, thread);
    }
  });
}

// Which keys of a tile the query rows of a key/value head see.
struct CausalTile {
  int64_t keys;        // in the tile
  int64_t first_keys;  // seen by row 0; may exceed the tile or be negative (none)
  int64_t group;       // rows per query
  int64_t window;      // keys that a row sees; 0: all

  // A row sees keys [hidden, visible) of the tile.
  int64_t visible(int64_t row) const { return std::min(keys, first_keys + row / group); }
  int64_t hidden(int64_t row) const {
    return window == 0 ? 0 : std::max<int64_t>(0, first_keys + row / group - window);
  }
  // The first row that sees this key or an earlier one.
  int64_t first_row(int64_t key) const {
    return std::max<int64_t>(0, (key + 1 - first_keys) * group);
  }
  // One past the last of `rows` rows that sees a key of the tile.
  int64_t end_row(int64_t rows) const {
    if (window == 0) return rows;
    return std::clamp<int64_t>((keys + window - first_keys) * group, 0, rows);
  }
};

// forward_scratch and backward_scratch: floats that an item of `rows` query rows needs, for all its
// heads together.
int64_t forward_scratch(const AttentionShape& shape, int64_t rows);
// An item that is one of several parts writes partial_size floats to `partial`; an item that is
// alone has no partial and writes the result.
int64_t partial_size(const AttentionShape& shape, int64_t rows);
void forward_item(const AttentionForward& problem, const Item& item, float* partial,
                  float* scratch);
// Writes the result of an item from its item.parts partials, stored one after the other.
void merge_partials(const AttentionForward& problem, const Item& item, const float* partials);

int64_t backward_scratch(const AttentionShape& shape, int64_t rows);
// An item covers one key/value head. d_q [q_len * group, padded(head_dim)] receives the
// contribution of its keys, not yet times the softmax scale.
void backward_item(const AttentionBackward& problem, const Item& item, float* d_q, float* scratch);

}  // namespace twell::attention
