// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "twell/base/error.h"
#include "twell/ops/attention/attention.h"
#include "twell/ops/attention/attention_items.h"

namespace twell {
namespace {

using attention::Item;
using attention::padded;

void check_shapes(const AttentionShape& shape, std::span<const AttentionSequence> sequences,
                  ConstMatrixF q, ConstMatrixF out) {
  const auto [heads, kv_heads, head_dim] = shape;
  TWELL_CHECK(heads > 0 && kv_heads > 0 && head_dim > 0 && heads % kv_heads == 0,
              "attention: {} heads on {} key/value heads of {}", heads, kv_heads, head_dim);
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
  }
}

// Items of at most `count` queries each.
std::vector<Item> query_items(const AttentionShape& shape,
                              std::span<const AttentionSequence> sequences, int64_t count) {
  const double row_cost = static_cast<double>(2 * shape.heads / shape.kv_heads * shape.head_dim);
  std::vector<Item> items;
  for (size_t i = 0; i < sequences.size(); ++i) {
    for (int64_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
      for (int64_t begin = 0; begin < sequences[i].q_len; begin += count) {
        const int64_t queries = std::min(count, sequences[i].q_len - begin);
        items.push_back({static_cast<int64_t>(i), kv_head, begin, queries,
                         row_cost * attention::causal_pairs(sequences[i], begin, queries)});
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
        // Keys from x on are seen by a share (1 - x / length)^2 of the pairs.
        const double share = 1.0 - std::sqrt(std::max(0.0, 1.0 - static_cast<double>(split) /
                                                                     static_cast<double>(splits)));
        const int64_t tile = attention::kTileKeys;
        int64_t end = static_cast<int64_t>(share * static_cast<double>(length));
        end = std::min(length, std::max(end / tile * tile, begin + tile));
        if (split >= splits) end = length;
        const double pairs = static_cast<double>(end - begin) *
                             (static_cast<double>(length) - static_cast<double>(begin + end) / 2);
        items.push_back({static_cast<int64_t>(i), kv_head, begin, end - begin, pair_cost * pairs});
        begin = end;
      }
    }
  }
  return items;
}

}  // namespace

void attention_forward(Context& ctx, const AttentionForward& problem) {
  check_shapes(problem.shape, problem.sequences, problem.q, problem.out);
  const int64_t group = problem.shape.heads / problem.shape.kv_heads;
  // 256 query rows share the packing of each key tile, and fit the L2 cache with their output;
  // fewer when the threads would run short of items. A row's result is the same for any cut.
  constexpr int64_t kMaxRows = 256, kMinRows = 32, kItemsPerThread = 4;
  int64_t count = std::max<int64_t>(1, kMaxRows / group);
  std::vector<Item> items = query_items(problem.shape, problem.sequences, count);
  while (static_cast<int64_t>(items.size()) < kItemsPerThread * ctx.threads() &&
         count * group > kMinRows) {
    count /= 2;
    items = query_items(problem.shape, problem.sequences, count);
  }
  int64_t rows = 0;
  for (const Item& item : items) rows = std::max(rows, item.count * group);
  Arena::Scope scope(ctx.scratch());
  const MatrixF scratch =
      scope.matrix<float>(ctx.threads(), padded(attention::forward_scratch(problem.shape, rows)));
  attention::for_each_item(ctx, items, [&](const Item& item, int thread) {
    attention::forward_item(problem, item, scratch.row(thread));
  });
}

void attention_backward(Context& ctx, const AttentionBackward& problem) {
  check_shapes(problem.shape, problem.sequences, problem.q, problem.out);
  const int64_t kv_heads = problem.shape.kv_heads, group = problem.shape.heads / kv_heads;
  const int64_t hd = problem.shape.head_dim, width = padded(hd);
  int64_t longest = 0;
  for (const AttentionSequence& s : problem.sequences) {
    TWELL_CHECK(s.k.rows == s.q_len, "attention backward: {} keys for {} queries", s.k.rows,
                s.q_len);
    longest = std::max(longest, s.q_len);
  }
  // Few sequences and heads: the keys are cut too, whatever the number of threads, so that the sums
  // of d_q do not depend on it.
  constexpr int64_t kEnoughItems = 16;
  const int64_t heads =
      std::max<int64_t>(1, static_cast<int64_t>(problem.sequences.size()) * problem.shape.kv_heads);
  const std::vector<Item> items =
      key_items(problem.shape, problem.sequences, (kEnoughItems + heads - 1) / heads);
  const int64_t rows = longest * group;
  Arena::Scope scope(ctx.scratch());
  const MatrixF scratch =
      scope.matrix<float>(ctx.threads(), padded(attention::backward_scratch(problem.shape, rows)));
  const MatrixF d_q = scope.matrix<float>(static_cast<int64_t>(items.size()), rows * width);
  attention::for_each_item(ctx, items, [&](const Item& item, int thread) {
    attention::backward_item(problem, item, d_q.row(&item - items.data()), scratch.row(thread));
  });

  const float scale = attention::softmax_scale(problem.shape);
  ctx.parallel_for(static_cast<int64_t>(items.size()), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const Item& first = items[static_cast<size_t>(i)];
      if (first.begin != 0) continue;  // a later part of a sequence and head
      const AttentionSequence& s = problem.sequences[static_cast<size_t>(first.sequence)];
      for (int64_t row = 0; row < s.q_len * group; ++row) {
        float* to =
            problem.d_q.row(s.q_begin + row / group) + (first.kv_head * group + row % group) * hd;
        for (int64_t c = 0; c < hd; ++c) to[c] = scale * d_q(i, row * width + c);
        for (size_t j = static_cast<size_t>(i) + 1; j < items.size() && items[j].begin != 0; ++j) {
          const float* part = d_q.row(static_cast<int64_t>(j)) + row * width;
          for (int64_t c = 0; c < hd; ++c) to[c] += scale * part[c];
        }
      }
    }
  });
}

}  // namespace twell
