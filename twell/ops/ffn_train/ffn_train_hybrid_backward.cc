// SPDX-License-Identifier: Apache-2.0
// By rows: d_h on the pattern, and d_x. By neurons, through the transposed pattern: the three
// weight gradients. Heavy rows through GEMMs.
#include <algorithm>

#include "twell/ops/ffn_train/executions.h"
#include "twell/ops/ffn_train/hybrid_work.h"
#include "twell/ops/ffn_train/sparse_rows_simd.h"
#include "twell/ops/ffn_train/transposed_rows.h"

namespace twell {
namespace {

float sign(float value) { return value > 0.0f ? 1.0f : (value < 0.0f ? -1.0f : 0.0f); }

// Tokens worked on at a time, which bounds the scratch memory.
constexpr int64_t kSpan = 2048;

struct CompactBackward {
  const FfnTrainBackward& problem;
  const FfnSaved& saved;
  int64_t first;    // token of the span
  int64_t count;    // tokens
  MatrixF d_h;      // [span, W] on the compact pattern, L1 included
  MatrixF factors;  // [threads, 2 * W] d_gate and d_up of a row's entries
};

// One row's entries [first, first + n), all in one block of neurons.
void backward_entries(const CompactBackward& work, int64_t m, int64_t first, int64_t n,
                      float* factors) {
  const HybridF32& hybrid = work.saved.hybrid;
  const FfnTrainBackward& problem = work.problem;
  const FfnWeights& w = problem.weights;
  const uint32_t* const index = hybrid.index.row(m) + first;
  const float* const g = hybrid.value.row(m) + first;
  float* const d_h = work.d_h.row(m - work.first) + first;
  float* const d_x = problem.d_x.row(m);
  gathered_dots(problem.d_y.row(m), w.w_down, index, n, d_h);
  if (!w.gated()) {
    for (int64_t i = 0; i < n; ++i) d_h[i] += problem.l1_scale;
    gathered_sum(d_h, w.w_up, index, n, d_x);
    return;
  }
  const float* const u = work.saved.up.row(m) + first;
  float* const d_gate = factors;
  float* const d_up = factors + n;
  for (int64_t i = 0; i < n; ++i) {
    d_h[i] += problem.l1_scale * sign(g[i] * u[i]);
    d_gate[i] = d_h[i] * u[i];
    d_up[i] = d_h[i] * g[i];
  }
  gathered_sum(d_gate, w.w_gate, index, n, d_x);
  gathered_sum(d_up, w.w_up, index, n, d_x);
}

void backward_compact_rows(const CompactBackward& work, int64_t begin, int64_t end, int thread) {
  const HybridF32& hybrid = work.saved.hybrid;
  const int64_t width = work.problem.x.cols;
  for (int64_t m = begin; m < end; ++m) {
    if (hybrid.is_compact(m)) std::fill_n(work.problem.d_x.row(m), width, 0.0f);
  }
  float* const factors = work.factors.row(thread);
  for_each_cached_run(
      hybrid, width, work.saved.gated() ? 3 : 2, begin, end,
      [&](int64_t m, int64_t first, int64_t n) { backward_entries(work, m, first, n, factors); });
}

void add_weight_gradients(const FfnTrainBackward& problem, const TransposedRows& rows,
                          int64_t begin, int64_t end, int64_t neuron) {
  const FfnGrads& grads = problem.grads;
  const int64_t n = end - begin;
  const uint32_t* const token = rows.token + begin;
  float* const d_w_up = grads.w_up.row(neuron);
  if (grads.gated()) {
    gathered_sum2(rows.d_gate + begin, rows.d_up + begin, problem.x, token, n,
                  grads.w_gate.row(neuron), d_w_up);
  } else {
    gathered_sum(rows.d_up + begin, problem.x, token, n, d_w_up);
  }
  gathered_sum(rows.h + begin, problem.d_y, token, n, grads.w_down.row(neuron));
}

// Tokens per block of the weight gradients: as many as keep x and d_y in cache, and at least as
// many as give a neuron enough entries to be worth fetching its three gradient rows.
int64_t tokens_per_block(int64_t tokens, int64_t width, int64_t ffn, int64_t nnz) {
  constexpr int64_t kEntriesPerNeuron = 16;
  const int64_t for_entries = nnz == 0 ? tokens : kEntriesPerNeuron * tokens * ffn / nnz;
  return std::min(tokens, std::max(cached_rows(width, 2), for_entries));
}

void backward_span(Context& ctx, const CompactBackward& work) {
  const int64_t ffn = work.saved.ffn();
  Arena::Scope scope(ctx.scratch());
  parallel_balanced(ctx, row_work(scope, work.saved.hybrid, work.first, work.count), work.count,
                    [&](int64_t begin, int64_t end, int thread) {
                      backward_compact_rows(work, work.first + begin, work.first + end, thread);
                    });
  const CompactSpan span = {
      .saved = work.saved, .first = work.first, .count = work.count, .d_h = work.d_h};
  const TransposedRows rows = transpose_rows(
      ctx, scope, span, tokens_per_block(work.count, work.problem.x.cols, ffn, span.nnz()));
  parallel_balanced(ctx, neuron_work(scope, rows), ffn, [&](int64_t begin, int64_t end, int) {
    for (int64_t block = 0; block < rows.blocks; ++block) {
      for (int64_t j = begin; j < end; ++j) {
        add_weight_gradients(work.problem, rows, rows.begin(block, j), rows.begin(block, j + 1), j);
      }
    }
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
    Arena::Scope scope(ctx.scratch());
    backward_span(ctx, {.problem = problem,
                        .saved = saved,
                        .first = first,
                        .count = count,
                        .d_h = scope.matrix<float>(count, width),
                        .factors = scope.matrix<float>(ctx.threads(), 2 * width)});
  }
  if (hybrid.tail_rows > 0) backward_tail(ctx, problem, saved);
}

}  // namespace twell
