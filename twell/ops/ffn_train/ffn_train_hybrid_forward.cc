// SPDX-License-Identifier: Apache-2.0
// gate GEMM in tiles of tokens -> pattern -> u, h and y on the pattern; heavy rows through GEMMs.
#include <algorithm>
#include <cmath>

#include "twell/ops/ffn_train/elementwise_simd.h"
#include "twell/ops/ffn_train/executions.h"
#include "twell/ops/ffn_train/hybrid_work.h"
#include "twell/ops/ffn_train/sliced_table.h"
#include "twell/ops/ffn_train/sparse_rows_simd.h"
#include "twell/ops/matmul/matmul.h"

namespace twell {
namespace {

// Gives the heavy rows of [first, first + count) their tail rows; false when the tail is full.
bool place_heavy_rows(HybridF32& hybrid, int64_t first, int64_t count) {
  for (int64_t m = first; m < first + count; ++m) {
    hybrid.tail_slot[m] = -1;
    if (hybrid.row_nnz[m] <= hybrid.shape.ell_width) continue;
    if (hybrid.tail_rows == hybrid.shape.tail_capacity) return false;
    hybrid.tail_slot[m] = static_cast<int32_t>(hybrid.tail_rows++);
  }
  return true;
}

// Stores a row of the gate GEMM; the tail's ReLU comes later.
void store_row(const HybridF32& hybrid, const float* gate, int64_t m, float* fired) {
  const int64_t ffn = hybrid.shape.cols;
  if (!hybrid.is_compact(m)) {
    std::copy_n(gate, ffn, hybrid.tail.row(hybrid.tail_slot[m]));
    return;
  }
  uint32_t* const index = hybrid.index.row(m);
  compress_active(gate, ffn, index, hybrid.value.row(m));
  if (fired == nullptr) return;
  for (int32_t i = 0; i < hybrid.row_nnz[m]; ++i) fired[index[i]] = 1.0f;
}

// The gate projection and its pattern. False when the tail cannot hold the heavy rows.
bool find_pattern(Context& ctx, const FfnTrainForward& problem, const FiredFlags& flags,
                  HybridF32& hybrid) {
  const FfnWeights& w = problem.weights;
  const int64_t tokens = problem.x.rows;
  const int64_t tile = std::min(tokens, kDenseChunk);
  Arena::Scope scope(ctx.scratch());
  const MatrixF buffer = scope.matrix<float>(tile, w.ffn());
  hybrid.tail_rows = 0;
  for (int64_t first = 0; first < tokens; first += tile) {
    const int64_t count = std::min(tile, tokens - first);
    const MatrixF gate = buffer.slice_rows(0, count);
    linear_forward(ctx, problem.x.slice_rows(first, count), w.firing(), gate);
    ctx.parallel_for(count, 4, [&](int64_t begin, int64_t end, int) {
      for (int64_t m = begin; m < end; ++m) {
        hybrid.row_nnz[first + m] = static_cast<int32_t>(count_active(gate.row(m), w.ffn()));
      }
    });
    if (!place_heavy_rows(hybrid, first, count)) return false;
    ctx.parallel_for(count, 4, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t m = begin; m < end; ++m) {
        store_row(hybrid, gate.row(m), first + m, flags.of_thread(thread));
      }
    });
  }
  return true;
}

// The compact rows of one span of tokens.
struct CompactForward {
  const FfnTrainForward& problem;
  const FfnSaved& saved;
  double* row_l1;  // [M]
  int64_t first;   // token of the span
  MatrixF h;       // [span, W]
  MatrixF slice;   // [threads, slice_floats]

  float* h_row(int64_t m) const { return h.row(m - first); }
};

// u = x w_up^T on the pattern.
void project_up(const CompactForward& work, int64_t begin, int64_t end, float* buffer) {
  const HybridF32& hybrid = work.saved.hybrid;
  const MatrixF& up = work.saved.up;
  for_each_entry_list(hybrid, begin, end, [&](int64_t m, const uint32_t*, int64_t n) {
    std::fill_n(up.row(m), n, 0.0f);
  });
  for_each_slice(work.problem.weights.w_up, buffer, [&](int64_t column, ConstMatrixF slice) {
    for_each_entry_list(hybrid, begin, end, [&](int64_t m, const uint32_t* index, int64_t n) {
      gathered_dots(work.problem.x.row(m) + column, slice, index, n, up.row(m));
    });
  });
}

// h = g * u (or g) on the pattern, and its sum per row.
void activate_compact(const CompactForward& work, int64_t begin, int64_t end) {
  const HybridF32& hybrid = work.saved.hybrid;
  for (int64_t m = begin; m < end; ++m) {
    if (!hybrid.is_compact(m)) continue;
    const float* const g = hybrid.value.row(m);
    const float* const u = work.saved.gated() ? work.saved.up.row(m) : nullptr;
    float* const h = work.h_row(m);
    double l1 = 0.0;
    for (int64_t i = 0; i < hybrid.row_nnz[m]; ++i) {
      h[i] = u == nullptr ? g[i] : g[i] * u[i];
      l1 += static_cast<double>(std::abs(h[i]));
    }
    work.row_l1[m] = l1;
  }
}

void forward_compact_rows(const CompactForward& work, int64_t begin, int64_t end, int thread) {
  const HybridF32& hybrid = work.saved.hybrid;
  const FfnWeights& w = work.problem.weights;
  float* const buffer = work.slice.row(thread);
  if (w.gated()) project_up(work, begin, end, buffer);
  activate_compact(work, begin, end);
  for (int64_t m = begin; m < end; ++m) {
    if (hybrid.is_compact(m)) std::fill_n(work.problem.y.row(m), w.width(), 0.0f);
  }
  for_each_slice(w.w_down, buffer, [&](int64_t column, ConstMatrixF slice) {
    for_each_entry_list(hybrid, begin, end, [&](int64_t m, const uint32_t* index, int64_t n) {
      gathered_sum(work.h_row(m), slice, index, n, work.problem.y.row(m) + column);
    });
  });
}

void forward_compact(Context& ctx, const FfnTrainForward& problem, const FfnSaved& saved,
                     double* row_l1) {
  const HybridF32& hybrid = saved.hybrid;
  for (int64_t first = 0; first < saved.tokens; first += kHybridSpan) {
    const int64_t count = std::min(kHybridSpan, saved.tokens - first);
    Arena::Scope scope(ctx.scratch());
    const CompactForward work = {
        .problem = problem,
        .saved = saved,
        .row_l1 = row_l1,
        .first = first,
        .h = scope.matrix<float>(count, hybrid.shape.ell_width),
        .slice =
            scope.matrix<float>(ctx.threads(), slice_floats(hybrid.shape.cols, problem.x.cols))};
    parallel_balanced(ctx, row_work(scope, hybrid, first, count), count,
                      [&](int64_t begin, int64_t end, int thread) {
                        forward_compact_rows(work, first + begin, first + end, thread);
                      });
  }
}

// Activation of tail rows [first, first + count); rows up to h.rows are padding, all zero.
void activate_tail(Context& ctx, const FfnSaved& saved, int64_t first, int64_t count,
                   const int32_t* tokens, MatrixF h, const FiredFlags& flags, double* row_l1) {
  const HybridF32& hybrid = saved.hybrid;
  const int64_t ffn = hybrid.shape.cols;
  ctx.parallel_for(count, 1, [&](int64_t begin, int64_t end, int thread) {
    float* const fired = flags.of_thread(thread);
    for (int64_t r = begin; r < end; ++r) {
      float* const gate = hybrid.tail.row(first + r);
      const RowActivity activity =
          saved.gated() ? relu_gate_row(gate, saved.up_tail.row(first + r), h.row(r), fired, ffn)
                        : relu_row(gate, fired, ffn);
      row_l1[tokens[first + r]] = activity.l1;
    }
  });
  const MatrixF padding = h.slice_rows(count, h.rows - count);
  std::fill_n(padding.data, padding.rows * ffn, 0.0f);
}

void forward_tail(Context& ctx, const FfnTrainForward& problem, const FfnSaved& saved,
                  const FiredFlags& flags, double* row_l1) {
  const FfnWeights& w = problem.weights;
  const HybridF32& hybrid = saved.hybrid;
  const int64_t capacity = hybrid.shape.tail_capacity;
  Arena::Scope scope(ctx.scratch());
  const int32_t* const tokens = tail_tokens(scope, hybrid);
  const int64_t padded_rows = padded_tail(hybrid.tail_rows, capacity);
  const MatrixF padding = hybrid.tail.slice_rows(hybrid.tail_rows, padded_rows - hybrid.tail_rows);
  std::fill_n(padding.data, padding.rows * w.ffn(), 0.0f);
  for (int64_t first = 0; first < hybrid.tail_rows; first += kDenseChunk) {
    const int64_t count = std::min(kDenseChunk, hybrid.tail_rows - first);
    const int64_t padded = padded_tail(count, capacity);
    Arena::Scope step(ctx.scratch());
    const MatrixF x = gather_rows(ctx, step, problem.x, tokens + first, count, padded);
    const MatrixF y = step.matrix<float>(padded, w.width());
    const MatrixF gate = hybrid.tail.slice_rows(first, padded);
    const MatrixF h = w.gated() ? step.matrix<float>(padded, w.ffn()) : gate;
    if (w.gated()) linear_forward(ctx, x, w.w_up, saved.up_tail.slice_rows(first, padded));
    activate_tail(ctx, saved, first, count, tokens, h, flags, row_l1);
    matmul(ctx, {.a = h, .b = w.w_down, .c = y});
    scatter_rows(ctx, y, tokens + first, count, problem.y);
  }
}

}  // namespace

bool hybrid_forward(Context& ctx, const FfnTrainForward& problem, FfnSaved& saved,
                    FfnTrainStats& stats) {
  const int64_t tokens = problem.x.rows;
  if (!saved.plan_hybrid(tokens)) return false;
  const HybridF32& hybrid = saved.hybrid;
  Arena::Scope scope(ctx.scratch());
  const FiredFlags flags(ctx, scope, problem.active);
  if (!find_pattern(ctx, problem, flags, saved.hybrid)) return false;
  saved.execution = FfnTrainExecution::kHybrid;
  saved.tokens = tokens;

  double* const row_l1 = scope.alloc<double>(tokens);
  forward_compact(ctx, problem, saved, row_l1);
  if (hybrid.tail_rows > 0) forward_tail(ctx, problem, saved, flags, row_l1);
  flags.merge();

  const HybridStats pattern = hybrid_stats(hybrid);
  stats = {.execution = FfnTrainExecution::kHybrid,
           .tokens = tokens,
           .nnz = pattern.nnz,
           .max_row_nnz = pattern.max_row_nnz,
           .tail_rows = pattern.tail_rows};
  for (int64_t m = 0; m < tokens; ++m) stats.l1_sum += row_l1[m];
  return true;
}

}  // namespace twell
