// SPDX-License-Identifier: Apache-2.0
// By rows: d_h on the pattern, and d_x. By neurons, through the transposed pattern: the three
// weight gradients. Heavy rows through GEMMs.
#include <algorithm>

#include "twell/ops/ffn_train/executions.h"
#include "twell/ops/ffn_train/hybrid_work.h"
#include "twell/ops/ffn_train/sliced_table.h"
#include "twell/ops/ffn_train/sparse_rows_simd.h"
#include "twell/ops/ffn_train/transposed_rows.h"

namespace twell {
namespace {

float sign(float value) { return value > 0.0f ? 1.0f : (value < 0.0f ? -1.0f : 0.0f); }

// Tokens worked on at a time: bounds the scratch memory, and is the table of tokens that the weight
// gradients read in slices.
constexpr int64_t kSpan = 2048;

struct CompactBackward {
  const FfnTrainBackward& problem;
  const FfnSaved& saved;
  int64_t first;   // token of the span
  int64_t count;   // tokens
  MatrixF d_h;     // [span, W] on the compact pattern, L1 included
  MatrixF factor;  // [threads, W]
  MatrixF slice;   // [threads, slice_floats of the weights or of the span's tokens]

  float* d_h_row(int64_t m) const { return d_h.row(m - first); }
};

// d_h = d_y w_down^T + l1_scale * sign(h) on the pattern.
void gradient_of_h(const CompactBackward& work, int64_t begin, int64_t end, float* buffer) {
  const FfnTrainBackward& problem = work.problem;
  const HybridF32& hybrid = work.saved.hybrid;
  for_each_entry_list(hybrid, begin, end, [&](int64_t m, const uint32_t*, int64_t n) {
    const float* const g = hybrid.value.row(m);
    const float* const u = work.saved.gated() ? work.saved.up.row(m) : nullptr;
    float* const d_h = work.d_h_row(m);
    for (int64_t i = 0; i < n; ++i) {
      d_h[i] = problem.l1_scale * sign(u == nullptr ? g[i] : g[i] * u[i]);
    }
  });
  for_each_slice(problem.weights.w_down, buffer, [&](int64_t column, ConstMatrixF slice) {
    for_each_entry_list(hybrid, begin, end, [&](int64_t m, const uint32_t* index, int64_t n) {
      gathered_dots(problem.d_y.row(m) + column, slice, index, n, work.d_h_row(m));
    });
  });
}

// d_x += (d_h * other) weight on the pattern, for the projection whose gradient is d_h * other.
void add_input_gradient(const CompactBackward& work, ConstMatrixF weight, ConstMatrixF other,
                        int64_t begin, int64_t end, int thread) {
  const HybridF32& hybrid = work.saved.hybrid;
  float* const factor = work.factor.row(thread);
  for_each_slice(weight, work.slice.row(thread), [&](int64_t column, ConstMatrixF slice) {
    for_each_entry_list(hybrid, begin, end, [&](int64_t m, const uint32_t* index, int64_t n) {
      const float* const d_h = work.d_h_row(m);
      for (int64_t i = 0; i < n; ++i) {
        factor[i] = other.empty() ? d_h[i] : d_h[i] * other(m, i);
      }
      gathered_sum(factor, slice, index, n, work.problem.d_x.row(m) + column);
    });
  });
}

void backward_compact_rows(const CompactBackward& work, int64_t begin, int64_t end, int thread) {
  const FfnSaved& saved = work.saved;
  const FfnWeights& w = work.problem.weights;
  for (int64_t m = begin; m < end; ++m) {
    if (saved.hybrid.is_compact(m)) std::fill_n(work.problem.d_x.row(m), w.width(), 0.0f);
  }
  gradient_of_h(work, begin, end, work.slice.row(thread));
  if (w.gated()) {
    add_input_gradient(work, w.w_gate, saved.up, begin, end, thread);
    add_input_gradient(work, w.w_up, saved.hybrid.value, begin, end, thread);
  } else {
    add_input_gradient(work, w.w_up, MatrixF(), begin, end, thread);
  }
}

// The three weight gradients of neurons [begin, end).
void backward_neurons(const CompactBackward& work, const TransposedRows& rows, int64_t begin,
                      int64_t end, float* buffer) {
  const FfnGrads& grads = work.problem.grads;
  const auto for_each_neuron = [&](const auto& fn) {
    for (int64_t j = begin; j < end; ++j) {
      const int64_t first = rows.offset[j];
      const int64_t n = rows.offset[j + 1] - first;
      if (n > 0) fn(j, first, n);
    }
  };
  const ConstMatrixF x = work.problem.x.slice_rows(work.first, work.count);
  for_each_slice(x, buffer, [&](int64_t column, ConstMatrixF slice) {
    for_each_neuron([&](int64_t j, int64_t first, int64_t n) {
      float* const d_w_up = grads.w_up.row(j) + column;
      if (grads.gated()) {
        gathered_sum2(rows.d_gate + first, rows.d_up + first, slice, rows.token + first, n,
                      grads.w_gate.row(j) + column, d_w_up);
      } else {
        gathered_sum(rows.d_up + first, slice, rows.token + first, n, d_w_up);
      }
    });
  });
  const ConstMatrixF d_y = work.problem.d_y.slice_rows(work.first, work.count);
  for_each_slice(d_y, buffer, [&](int64_t column, ConstMatrixF slice) {
    for_each_neuron([&](int64_t j, int64_t first, int64_t n) {
      gathered_sum(rows.h + first, slice, rows.token + first, n, grads.w_down.row(j) + column);
    });
  });
}

void backward_span(Context& ctx, const CompactBackward& work) {
  Arena::Scope scope(ctx.scratch());
  parallel_balanced(ctx, row_work(scope, work.saved.hybrid, work.first, work.count), work.count,
                    [&](int64_t begin, int64_t end, int thread) {
                      backward_compact_rows(work, work.first + begin, work.first + end, thread);
                    });
  const TransposedRows rows = transpose_rows(
      ctx, scope, {.saved = work.saved, .first = work.first, .count = work.count, .d_h = work.d_h});
  parallel_balanced(ctx, rows.offset, work.saved.ffn(),
                    [&](int64_t begin, int64_t end, int thread) {
                      backward_neurons(work, rows, begin, end, work.slice.row(thread));
                    });
}

void backward_tail(Context& ctx, const FfnTrainBackward& problem, const FfnSaved& saved) {
  const HybridF32& hybrid = saved.hybrid;
  const int64_t capacity = hybrid.shape.tail_capacity;
  Arena::Scope scope(ctx.scratch());
  const int32_t* const tokens = tail_tokens(scope, hybrid);
  for (int64_t first = 0; first < hybrid.tail_rows; first += kDenseChunk) {
    const int64_t count = std::min(kDenseChunk, hybrid.tail_rows - first);
    const int64_t padded = padded_tail(count, capacity);
    Arena::Scope chunk(ctx.scratch());
    const DenseBackwardStep step = {
        .x = gather_rows(ctx, chunk, problem.x, tokens + first, count, padded),
        .d_y = gather_rows(ctx, chunk, problem.d_y, tokens + first, count, padded),
        .gate = hybrid.tail.slice_rows(first, padded),
        .up = saved.gated() ? saved.up_tail.slice_rows(first, padded) : MatrixF(),
        .d_x = chunk.matrix<float>(padded, problem.x.cols)};
    dense_backward_step(ctx, problem.weights, problem.l1_scale, step, problem.grads);
    scatter_rows(ctx, step.d_x, tokens + first, count, problem.d_x);
  }
}

}  // namespace

void hybrid_backward(Context& ctx, const FfnTrainBackward& problem, const FfnSaved& saved) {
  const HybridF32& hybrid = saved.hybrid;
  const int64_t width = hybrid.shape.ell_width;
  for (int64_t first = 0; first < saved.tokens; first += kSpan) {
    const int64_t count = std::min(kSpan, saved.tokens - first);
    const int64_t slice = std::max(slice_floats(hybrid.shape.cols, problem.x.cols),
                                   slice_floats(count, problem.x.cols));
    Arena::Scope scope(ctx.scratch());
    backward_span(ctx, {.problem = problem,
                        .saved = saved,
                        .first = first,
                        .count = count,
                        .d_h = scope.matrix<float>(count, width),
                        .factor = scope.matrix<float>(ctx.threads(), width),
                        .slice = scope.matrix<float>(ctx.threads(), slice)});
  }
  if (hybrid.tail_rows > 0) backward_tail(ctx, problem, saved);
}

}  // namespace twell
