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

// The compact rows of one span of tokens.
struct CompactBackward {
  const FfnTrainBackward& problem;
  const FfnSaved& saved;
  CompactSpan span;
  MatrixF slice;  // [threads, slice_floats of the weights or of the span's tokens]
};

// d_up = d_y w_down^T on the pattern, to begin with.
void project_down(const CompactBackward& work, int64_t begin, int64_t end, float* buffer) {
  const HybridF32& hybrid = work.saved.hybrid;
  const CompactSpan& span = work.span;
  for_each_entry_list(hybrid, begin, end, [&](int64_t m, const uint32_t*, int64_t n) {
    std::fill_n(span.d_up.row(m - span.first), n, 0.0f);
  });
  for_each_slice(work.problem.weights.w_down, buffer, [&](int64_t column, ConstMatrixF slice) {
    for_each_entry_list(hybrid, begin, end, [&](int64_t m, const uint32_t* index, int64_t n) {
      gathered_dots(work.problem.d_y.row(m) + column, slice, index, n,
                    span.d_up.row(m - span.first));
    });
  });
}

// From d_h in d_up: h, d_gate and d_up, with the L1 term.
void differentiate_activation(const CompactBackward& work, int64_t begin, int64_t end) {
  const CompactSpan& span = work.span;
  const float l1_scale = work.problem.l1_scale;
  for_each_entry_list(work.saved.hybrid, begin, end, [&](int64_t m, const uint32_t*, int64_t n) {
    const float* const g = work.saved.hybrid.value.row(m);
    float* const d_up = span.d_up.row(m - span.first);
    float* const h = span.h.row(m - span.first);
    if (!work.saved.gated()) {
      for (int64_t i = 0; i < n; ++i) {
        h[i] = g[i];
        d_up[i] += l1_scale;
      }
      return;
    }
    const float* const u = work.saved.up.row(m);
    float* const d_gate = span.d_gate.row(m - span.first);
    for (int64_t i = 0; i < n; ++i) {
      h[i] = g[i] * u[i];
      const float d_h = d_up[i] + l1_scale * sign(h[i]);
      d_gate[i] = d_h * u[i];
      d_up[i] = d_h * g[i];
    }
  });
}

// d_x += gradient * weight on the pattern.
void add_input_gradient(const CompactBackward& work, ConstMatrixF weight, MatrixF gradient,
                        int64_t begin, int64_t end, float* buffer) {
  for_each_slice(weight, buffer, [&](int64_t column, ConstMatrixF slice) {
    for_each_entry_list(work.saved.hybrid, begin, end,
                        [&](int64_t m, const uint32_t* index, int64_t n) {
                          gathered_sum(gradient.row(m - work.span.first), slice, index, n,
                                       work.problem.d_x.row(m) + column);
                        });
  });
}

void backward_compact_rows(const CompactBackward& work, int64_t begin, int64_t end, float* buffer) {
  const FfnWeights& w = work.problem.weights;
  for (int64_t m = begin; m < end; ++m) {
    if (work.saved.hybrid.is_compact(m)) {
      std::fill_n(work.problem.d_x.row(m), w.width(), 0.0f);
    }
  }
  project_down(work, begin, end, buffer);
  differentiate_activation(work, begin, end);
  if (w.gated()) add_input_gradient(work, w.w_gate, work.span.d_gate, begin, end, buffer);
  add_input_gradient(work, w.w_up, work.span.d_up, begin, end, buffer);
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
  const ConstMatrixF x = work.problem.x.slice_rows(work.span.first, work.span.count);
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
  const ConstMatrixF d_y = work.problem.d_y.slice_rows(work.span.first, work.span.count);
  for_each_slice(d_y, buffer, [&](int64_t column, ConstMatrixF slice) {
    for_each_neuron([&](int64_t j, int64_t first, int64_t n) {
      gathered_sum(rows.h + first, slice, rows.token + first, n, grads.w_down.row(j) + column);
    });
  });
}

void backward_span(Context& ctx, const CompactBackward& work) {
  const CompactSpan& span = work.span;
  Arena::Scope scope(ctx.scratch());
  parallel_balanced(ctx, row_work(scope, work.saved.hybrid, span.first, span.count), span.count,
                    [&](int64_t begin, int64_t end, int thread) {
                      backward_compact_rows(work, span.first + begin, span.first + end,
                                            work.slice.row(thread));
                    });
  const TransposedRows rows = transpose_rows(ctx, scope, work.saved.hybrid, span);
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
  const int64_t entries = hybrid.shape.ell_width;
  const int64_t width = problem.x.cols;
  for (int64_t first = 0; first < saved.tokens; first += kHybridSpan) {
    const int64_t count = std::min(kHybridSpan, saved.tokens - first);
    Arena::Scope scope(ctx.scratch());
    const CompactSpan span = {
        .first = first,
        .count = count,
        .d_gate = saved.gated() ? scope.matrix<float>(count, entries) : MatrixF(),
        .d_up = scope.matrix<float>(count, entries),
        .h = scope.matrix<float>(count, entries)};
    const int64_t slice =
        std::max(slice_floats(hybrid.shape.cols, width), slice_floats(count, width));
    backward_span(ctx, {.problem = problem,
                        .saved = saved,
                        .span = span,
                        .slice = scope.matrix<float>(ctx.threads(), slice)});
  }
  if (hybrid.tail_rows > 0) backward_tail(ctx, problem, saved);
}

}  // namespace twell
