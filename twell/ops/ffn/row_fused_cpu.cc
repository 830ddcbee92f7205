// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "twell/base/error.h"
#include "twell/ops/ffn/pair_kernels_simd.h"
#include "twell/ops/ffn/problem_check.h"
#include "twell/ops/ffn/sparse_up_down.h"
#include "twell/ops/ffn/work_split.h"

namespace twell {
namespace {

// Pairs whose up and down rows are processed together: few enough that their weight rows stay in
// the L2 cache until the second use, and that pointers fit on the stack.
constexpr int64_t kBlock = 16;

// Pairs [begin, end) of one row of the gate.
struct PairRange {
  const Csr& pairs;
  int64_t begin;
  int64_t end;
};

// h[i] = gate of pair i * <x, w_up of its neuron>
void up(const SparseUpDown& problem, const PairRange& range, const float* x, float* h) {
  const auto& [pairs, begin, end] = range;
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t count = std::min(kBlock, end - i);
    float* sums = h + (i - begin);
    std::fill_n(sums, count, 0.0f);
    for (int64_t first = 0; first < problem.w_up.cols; first += kColumnBlock) {
      const int64_t d = std::min(kColumnBlock, problem.w_up.cols - first);
      const void* rows[kBlock];
      for (int64_t j = 0; j < count; ++j) rows[j] = problem.w_up.at(pairs.column[i + j], first);
      // Prefetch the same rows' next block if it is as wide, else the rows of down.
      const bool more = first + 2 * d <= problem.w_up.cols;
      add_dots({.a = x + first,
                .b = rows,
                .b_dtype = problem.w_up.dtype,
                .sums = sums,
                .count = count,
                .d = d,
                .prefetch = more ? problem.w_up.at(pairs.column[i], first + d)
                                 : problem.w_down.at(pairs.column[i])});
    }
    for (int64_t j = 0; j < count; ++j) sums[j] *= pairs.value[i + j];
  }
}

// y[first, first + d) += sum over the pairs of h[i] * w_down of its neuron
void down(const SparseUpDown& problem, const PairRange& range, const float* h, float* y,
          int64_t first, int64_t d) {
  const auto& [pairs, begin, end] = range;
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t count = std::min(kBlock, end - i);
    const void* rows[kBlock];
    for (int64_t j = 0; j < count; ++j) {
      rows[j] = problem.w_down.at(pairs.column[i + j], first);
    }
    add_scaled_rows({.y = y + first,
                     .rows = rows,
                     .dtype = problem.w_down.dtype,
                     .scale = h + (i - begin),
                     .count = count,
                     .d = d,
                     .prefetch = rows[count - 1]});
  }
}

void run_tokens(const SparseUpDown& problem, const Csr& pairs, int64_t begin, int64_t end) {
  const int64_t d = problem.w_down.cols;
  for (int64_t row = begin; row < end; ++row) {
    float* y = problem.y.row(row);
    std::fill_n(y, d, 0.0f);
    const int64_t last = pairs.row_begin[row + 1];
    for (int64_t i = pairs.row_begin[row]; i < last; i += kBlock) {
      const PairRange block{pairs, i, std::min(i + kBlock, last)};
      float h[kBlock];
      if (!problem.w_up.empty()) {
        up(problem, block, problem.x.row(row), h);
      } else {
        std::copy(pairs.value + block.begin, pairs.value + block.end, h);
      }
      down(problem, block, h, y, 0, d);
    }
  }
}

// For few tokens, or one that outweighs the rest: threads share all pairs evenly in up, and the
// columns of y in down. Costs a barrier and, with many threads, short pieces of weight rows.
void run_pairs(Context& ctx, const SparseUpDown& problem, const Csr& pairs) {
  Arena::Scope scope(ctx.scratch());
  const float* h = pairs.value;
  if (!problem.w_up.empty()) {
    float* products = scope.alloc<float>(pairs.nnz());
    ctx.parallel_for(pairs.nnz(), kBlock, [&](int64_t begin, int64_t end, int) {
      const int64_t* after = std::upper_bound(pairs.row_begin, pairs.row_begin + pairs.rows, begin);
      for (int64_t row = after - pairs.row_begin - 1; begin < end; ++row) {
        const int64_t last = std::min(end, pairs.row_begin[row + 1]);
        if (begin < last) up(problem, {pairs, begin, last}, problem.x.row(row), products + begin);
        begin = last;
      }
    });
    h = products;
  }
  constexpr int64_t kMinColumns =
      256;  // 1 KiB of a weight row: streams rather than scattered lines
  ctx.parallel_for(problem.y.cols, kMinColumns, [&](int64_t first, int64_t last, int) {
    for (int64_t row = 0; row < pairs.rows; ++row) {
      std::fill_n(problem.y.row(row) + first, last - first, 0.0f);
      const PairRange all{pairs, pairs.row_begin[row], pairs.row_begin[row + 1]};
      down(problem, all, h + all.begin, problem.y.row(row), first, last - first);
    }
  });
}

}  // namespace

Csr active_pairs(Context& ctx, Arena::Scope& scope, const SparseUpDown& problem) {
  const Csr pairs = csr_from_twell(ctx, scope, problem.gate);
  if (problem.squared) {
    for (int64_t i = 0; i < pairs.nnz(); ++i) pairs.value[i] *= pairs.value[i];
  }
  return pairs;
}

void row_fused_up_down(Context& ctx, const SparseUpDown& problem) {
  check_sparse_up_down(problem);
  Arena::Scope scope(ctx.scratch());
  const Csr pairs = active_pairs(ctx, scope, problem);
  int64_t heaviest = 0;
  for (int64_t row = 0; row < pairs.rows; ++row) {
    heaviest = std::max(heaviest, pairs.row_nnz(row));
  }
  // A thread's share of whole tokens exceeds the mean by up to one token.
  const bool stalls = heaviest * ctx.threads() > pairs.nnz() / 4;
  if (stalls && ctx.threads() > 1) {
    run_pairs(ctx, problem, pairs);
  } else {
    parallel_over_rows(ctx, pairs, [&](int64_t begin, int64_t end, int64_t) {
      run_tokens(problem, pairs, begin, end);
    });
  }
}

}  // namespace twell
