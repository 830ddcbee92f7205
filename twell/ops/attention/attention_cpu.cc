// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "twell/base/error.h"
#include "twell/ops/attention/attention.h"
#include "twell/ops/attention/attention_items.h"

namespace twell {
namespace {

using attention::Item;
using attention::padded;

void check_shapes(const AttentionShape& shape, std::span<const AttentionSequence> sequences,
                  ConstMatrixF q, ConstMatrixF out) {
  const auto [heads, kv_heads, head_dim, window] = shape;
  TWELL_CHECK(heads > 0 && kv_heads > 0 && head_dim > 0 && heads % kv_heads == 0,
              "attention: {} heads on {} key/value heads of {}", heads, kv_heads, head_dim);
  TWELL_CHECK(window >= 0, "attention: a sliding window of {} keys", window);
  TWELL_CHECK(q.cols == heads * head_dim && out.cols == q.cols && out.rows == q.rows,
              "attention: q [{}, {}] and out [{}, {}] for {} heads of {}", q.rows, q.cols, out.rows,
              out.cols, heads, head_dim);
  for (const AttentionSequence& s : sequences) {
    TWELL_CHECK(s.q_begin >= 0 && s.q_len >= 0 && s.q_begin + s.q_len <= q.rows,
                "attention: queries {}..{} of {} rows", s.q_begin, s.q_begin + s.q_len, q.rows);
    TWELL_CHECK(s.k.cols == kv_heads * head_dim && s.v.cols == s.k.cols && s.k.rows == s.v.rows &&
                    s.k.rows >= s.q_len,
                "attention: k [{}, {}] and v [{}, {}] for {} queries, {} heads of {}", s.k.rows,
                s.k.cols, s.v.rows, s.v.cols, s.q_len, kv_heads, head_dim);
    TWELL_CHECK(s.blocks == nullptr || is_attention_block(s.block_rows),
                "attention: keys in blocks of {} rows", s.block_rows);
  }
}

// Adds the item, split along its keys if its sequence has few query rows.
void add_split(std::vector<Item>& items, Item item, const AttentionSequence& s,
               const AttentionShape& shape) {
  const int64_t position = s.k.rows - s.q_len + item.begin, keys = position + item.count;
  const int64_t first = attention::first_visible_key(shape, position);
  item.first_key = first / attention::kSplitKeys * attention::kSplitKeys;
  if (s.q_len * (shape.heads / shape.kv_heads) <= attention::kSplitRows) {
    item.parts = (keys - item.first_key + attention::kSplitKeys - 1) / attention::kSplitKeys;
    item.cost /= static_cast<double>(item.parts);
  }
  for (item.part = 0; item.part < item.parts; ++item.part) items.push_back(item);
}

// Items of at most `rows` query rows: whole key/value heads where they fit, else `rows` rows of one
// head.
std::vector<Item> query_items(const AttentionShape& shape,
                              std::span<const AttentionSequence> sequences, int64_t rows) {
  const int64_t group = shape.heads / shape.kv_heads;
  const double pair_cost = static_cast<double>(2 * group * shape.head_dim);
  std::vector<Item> items;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const AttentionSequence& s = sequences[i];
    const int64_t count = std::max<int64_t>(1, std::min(s.q_len, rows / group));
    const int64_t heads = std::clamp<int64_t>(rows / (group * count), 1, shape.kv_heads);
    for (int64_t kv_head = 0; kv_head < shape.kv_heads; kv_head += heads) {
      for (int64_t begin = 0; begin < s.q_len; begin += count) {
        Item item{static_cast<int64_t>(i),
                  kv_head,
                  std::min(heads, shape.kv_heads - kv_head),
                  begin,
                  std::min(count, s.q_len - begin),
                  0};
        item.cost = pair_cost * static_cast<double>(item.kv_heads) *
                    attention::causal_pairs(shape, s, begin, item.count);
        add_split(items, item, s, shape);
      }
    }
  }
  return items;
}

// Each (sequence, key/value head), its keys cut into about `splits` items of the same cost.
std::vector<Item> key_items(const AttentionShape& shape,
                            std::span<const AttentionSequence> sequences, int64_t splits) {
  const double pair_cost = static_cast<double>(5 * shape.heads / shape.kv_heads * shape.head_dim);
  std::vector<Item> items;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const int64_t length = sequences[i].q_len;
    for (int64_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
      int64_t begin = 0;
      for (int64_t split = 1; begin < length; ++split) {
        // Without a window, keys from x on account for a share (1 - x / length)^2 of the pairs.
        const double share = 1.0 - std::sqrt(std::max(0.0, 1.0 - static_cast<double>(split) /
                                                                     static_cast<double>(splits)));
        const int64_t tile = attention::kTileKeys;
        int64_t end = static_cast<int64_t>(share * static_cast<double>(length));
        end = std::min(length, std::max(end / tile * tile, begin + tile));
        if (split >= splits) end = length;
        const double pairs = static_cast<double>(end - begin) *
                             (static_cast<double>(length) - static_cast<double>(begin + end) / 2);
        items.push_back(
            {static_cast<int64_t>(i), kv_head, 1, begin, end - begin, pair_cost * pairs});
        begin = end;
      }
    }
  }
  return items;
}

// d_q of the item's head = (or +=) scale * part [q_len * group, padded hd].
void add_query_gradient(const AttentionBackward& problem, const Item& item, const float* part,
                        bool add) {
  const AttentionSequence& s = problem.sequences[static_cast<size_t>(item.sequence)];
  const int64_t group = problem.shape.heads / problem.shape.kv_heads;
  const int64_t hd = problem.shape.head_dim, width = padded(hd);
  const float scale = attention::softmax_scale(problem.shape);
  for (int64_t row = 0; row < s.q_len * group; ++row) {
    const float* from = part + row * width;
    float* to =
        problem.d_q.row(s.q_begin + row / group) + (item.kv_head * group + row % group) * hd;
#pragma omp simd
    for (int64_t c = 0; c < hd; ++c) to[c] = (add ? to[c] : 0.0f) + scale * from[c];
  }
}

}  // namespace

void attention_forward(Context& ctx, const AttentionForward& problem) {
  check_shapes(problem.shape, problem.sequences, problem.q, problem.out);
  const int64_t group = problem.shape.heads / problem.shape.kv_heads;
  // 256 query rows share the packing of each tile of keys, and fit the L2 cache with their output.
  // Fewer rows if threads would lack items; a row's result does not depend on it.
  constexpr int64_t kMaxRows = 256, kItemsPerThread = 4;
  int64_t cut = std::max(kMaxRows, group);
  std::vector<Item> items = query_items(problem.shape, problem.sequences, cut);
  while (static_cast<int64_t>(items.size()) < kItemsPerThread * ctx.threads() && cut >= 2 * group) {
    cut /= 2;
    items = query_items(problem.shape, problem.sequences, cut);
  }
  // Parts of one group of queries lie one after the other.
  int64_t rows = 0, partial_floats = 0;
  std::vector<int64_t> partial_at(items.size(), -1);
  for (size_t i = 0; i < items.size(); ++i) {
    const int64_t item_rows = items[i].kv_heads * items[i].count * group;
    rows = std::max(rows, item_rows);
    if (items[i].parts == 1) continue;
    partial_at[i] = partial_floats;
    partial_floats += attention::partial_size(problem.shape, item_rows);
  }
  Arena::Scope scope(ctx.scratch());
  const MatrixF scratch =
      scope.matrix<float>(ctx.threads(), padded(attention::forward_scratch(problem.shape, rows)));
  float* const partials = scope.alloc<float>(partial_floats);
  attention::for_each_item(ctx, items, [&](const Item& item, int thread) {
    const int64_t at = partial_at[static_cast<size_t>(&item - items.data())];
    attention::forward_item(problem, item, at < 0 ? nullptr : partials + at, scratch.row(thread));
  });
  if (partial_floats == 0) return;
  ctx.parallel_for(std::ssize(items), 1, [&](int64_t begin, int64_t end, int) {
    for (size_t i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      if (items[i].parts == 1 || items[i].part > 0) continue;  // merged by the first part
      attention::merge_partials(problem, items[i], partials + partial_at[i]);
    }
  });
}

void attention_backward(Context& ctx, const AttentionBackward& problem) {
  check_shapes(problem.shape, problem.sequences, problem.q, problem.out);
  int64_t longest = 0;
  for (const AttentionSequence& s : problem.sequences) {
    TWELL_CHECK(
        s.k.rows == s.q_len && s.blocks == nullptr && s.k8.data == nullptr,
        "attention backward: {} keys for {} queries, in one piece of memory: {}, in 32 bits: "
        "{}",
        s.k.rows, s.q_len, s.blocks == nullptr, s.k8.data == nullptr);
    longest = std::max(longest, s.q_len);
  }
  // With few sequences and heads, the keys are split too. The split depends on their number, not on
  // that of the threads, so that d_q is summed in the same order for any number of threads.
  constexpr int64_t kEnoughItems = 16;
  const int64_t heads =
      std::max<int64_t>(1, static_cast<int64_t>(problem.sequences.size()) * problem.shape.kv_heads);
  const int64_t splits = (kEnoughItems + heads - 1) / heads;
  const std::vector<Item> items = key_items(problem.shape, problem.sequences, splits);

  const int64_t rows = longest * problem.shape.heads / problem.shape.kv_heads;
  const int64_t parts = splits == 1 ? ctx.threads() : static_cast<int64_t>(items.size());
  Arena::Scope scope(ctx.scratch());
  const MatrixF d_q = scope.matrix<float>(parts, rows * padded(problem.shape.head_dim));
  const MatrixF scratch =
      scope.matrix<float>(ctx.threads(), padded(attention::backward_scratch(problem.shape, rows)));
  attention::for_each_item(ctx, items, [&](const Item& item, int thread) {
    float* part = d_q.row(splits == 1 ? thread : &item - items.data());
    attention::backward_item(problem, item, part, scratch.row(thread));
    if (splits == 1) add_query_gradient(problem, item, part, /*add=*/false);
  });
  if (splits == 1) return;
  ctx.parallel_for(parts, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      if (items[static_cast<size_t>(i)].begin != 0) continue;  // added by the head's first part
      for (int64_t j = i; j < parts; ++j) {
        const Item& item = items[static_cast<size_t>(j)];
        if (j > i && item.begin == 0) break;
        add_query_gradient(problem, item, d_q.row(j), /*add=*/j > i);
      }
    }
  });
}

}  // namespace twell
