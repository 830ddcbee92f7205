// SPDX-License-Identifier: Apache-2.0
// The dense execution: GEMMs with elementwise kernels between them, a chunk of tokens at a time.
#include <algorithm>

#include "twell/ops/activation/activation_rows.h"
#include "twell/ops/bias/bias.h"
#include "twell/ops/ffn_train/ffn_train_cpu.h"
#include "twell/ops/matmul/matmul.h"

namespace twell {
namespace {

constexpr int64_t kRowGrain = 4;

// A non-gated ReLU layer overwrites its input with h. Every other layer needs both.
bool needs_h(const FfnWeights& w) { return w.gated() || !w.activation.is_relu(); }

const float* row_or_null(ConstMatrixF rows, int64_t m) {
  return rows.empty() ? nullptr : rows.row(m);
}

// Applies the activation to rows [first, first + h.rows); h [chunk, F] is written.
void activate(Context& ctx, const BlendedActivation& f, const FfnSaved& saved, int64_t first,
              MatrixF h, const FiredFlags& flags, std::span<ActivatedRow> activity) {
  const MatrixF gate = saved.dense_gate(saved.tokens).slice_rows(first, h.rows);
  const MatrixF up =
      saved.gated() ? saved.dense_up(saved.tokens).slice_rows(first, h.rows) : MatrixF();
  ctx.parallel_for(h.rows, kRowGrain, [&](int64_t begin, int64_t end, int thread) {
    float* const fired = flags.of_thread(thread);
    for (int64_t m = begin; m < end; ++m) {
      activity[static_cast<size_t>(first + m)] =
          activate_row(f, gate.row(m), row_or_null(up, m), h.row(m), fired, h.cols);
    }
  });
}

}  // namespace

FfnTrainStats dense_forward(Context& ctx, const FfnTrainForward& problem, FfnSaved& saved) {
  const FfnWeights& w = problem.weights;
  const int64_t tokens = problem.x.rows;
  saved.execution = FfnTrainExecution::kDense;
  saved.tokens = tokens;
  Arena::Scope scope(ctx.scratch());
  const std::span<ActivatedRow> activity(scope.alloc<ActivatedRow>(tokens),
                                         static_cast<size_t>(tokens));
  const FiredFlags flags(ctx, scope, problem.active);
  const int64_t chunk = std::min(tokens, kDenseChunk);
  const MatrixF h_buffer = needs_h(w) ? scope.matrix<float>(chunk, w.ffn()) : MatrixF();

  for (int64_t first = 0; first < tokens; first += chunk) {
    const int64_t count = std::min(chunk, tokens - first);
    const ConstMatrixF x = problem.x.slice_rows(first, count);
    const MatrixF gate = saved.dense_gate(tokens).slice_rows(first, count);
    linear_forward(ctx, x, w.firing(), gate);
    if (w.biased()) bias_forward(ctx, w.firing_bias(), gate);
    if (w.gated()) {
      const MatrixF up = saved.dense_up(tokens).slice_rows(first, count);
      linear_forward(ctx, x, w.w_up, up);
      if (w.biased()) bias_forward(ctx, w.b_up, up);
    }
    const MatrixF h = needs_h(w) ? h_buffer.slice_rows(0, count) : gate;
    activate(ctx, w.activation, saved, first, h, flags, activity);
    const MatrixF y = problem.y.slice_rows(first, count);
    matmul(ctx, {.a = h, .b = w.w_down, .c = y});
    if (w.biased()) bias_forward(ctx, w.b_down, y);
  }

  flags.merge();
  FfnTrainStats stats = {.execution = FfnTrainExecution::kDense, .tokens = tokens};
  for (const ActivatedRow& row : activity) {
    stats.nnz += row.nnz;
    stats.max_row_nnz = std::max(stats.max_row_nnz, row.nnz);
    stats.l1_sum += row.l1;
  }
  return stats;
}

void dense_backward_step(Context& ctx, const FfnWeights& w, float l1_scale,
                         const DenseBackwardStep& step, const FfnGrads& grads) {
  const auto& [x, d_y, gate, up, d_x] = step;
  const int64_t count = x.rows;
  Arena::Scope scope(ctx.scratch());
  const MatrixF d_h = scope.matrix<float>(count, w.ffn());
  linear_forward(ctx, d_y, w.w_down, d_h);
  const MatrixF d_up = w.gated() ? scope.matrix<float>(count, w.ffn()) : MatrixF();
  const MatrixF h_buffer = needs_h(w) ? scope.matrix<float>(count, w.ffn()) : MatrixF();
  ctx.parallel_for(count, kRowGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t m = begin; m < end; ++m) {
      activate_backward_row(w.activation,
                            {.x = step.gate.row(m),
                             .u = row_or_null(step.up, m),
                             .l1 = l1_scale,
                             .d_h = d_h.row(m),
                             .d_u = w.gated() ? d_up.row(m) : nullptr,
                             .h = needs_h(w) ? h_buffer.row(m) : nullptr},
                            w.ffn());
    }
  });
  const MatrixF d_firing = d_h;  // overwritten in place
  if (w.biased()) {
    bias_backward(ctx, d_firing, grads.firing_bias());
    if (w.gated()) bias_backward(ctx, d_up, grads.b_up);
    bias_backward(ctx, d_y, grads.b_down);
  }
  linear_backward(
      ctx, {.x = x, .weight = w.firing(), .d_y = d_firing, .d_x = d_x, .d_weight = grads.firing()});
  if (w.gated()) {
    linear_backward(ctx, {.x = x,
                          .weight = w.w_up,
                          .d_y = d_up,
                          .d_x = d_x,
                          .d_x_beta = 1.0f,
                          .d_weight = grads.w_up});
  }
  const ConstMatrixF h = needs_h(w) ? ConstMatrixF(h_buffer) : gate;
  matmul(ctx, {.a = h, .b = d_y, .c = grads.w_down, .trans_a = true, .beta = 1.0f});
}

void dense_backward(Context& ctx, const FfnTrainBackward& problem, const FfnSaved& saved) {
  const int64_t tokens = saved.tokens;
  const int64_t chunk = std::min(tokens, kDenseChunk);
  for (int64_t first = 0; first < tokens; first += chunk) {
    const int64_t count = std::min(chunk, tokens - first);
    const DenseBackwardStep step = {
        .x = problem.x.slice_rows(first, count),
        .d_y = problem.d_y.slice_rows(first, count),
        .gate = saved.dense_gate(tokens).slice_rows(first, count),
        .up = saved.gated() ? saved.dense_up(tokens).slice_rows(first, count) : MatrixF(),
        .d_x = problem.d_x.slice_rows(first, count)};
    dense_backward_step(ctx, problem.weights, problem.l1_scale, step, problem.grads);
  }
}

}  // namespace twell
