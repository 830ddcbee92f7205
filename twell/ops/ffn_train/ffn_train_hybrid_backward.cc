// SPDX-License-Identifier: Apache-2.0
// By rows: d_h on the pattern, and d_x. By neurons, through the transposed pattern: the three
// weight gradients. Heavy rows through GEMMs.
#include <algorithm>

#include "twell/ops/ffn_train/executions.h"
#include "twell/ops/ffn_train/hybrid_work.h"
#include "twell/ops/ffn_train/sparse_rows_simd.h"

namespace twell {
namespace {

float sign(float value) { return value > 0.0f ? 1.0f : (value < 0.0f ? -1.0f : 0.0f); }

struct CompactBackward {
  const FfnTrainBackward& problem;
  const FfnSaved& saved;
  MatrixF d_h;      // [M, W] on the compact pattern, L1 included
  int32_t* next;    // [M] first entry of each row that is not done yet
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
  float* const d_h = work.d_h.row(m) + first;
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
  const FfnWeights& w = work.problem.weights;
  for (int64_t m = begin; m < end; ++m) {
    work.next[m] = 0;
    if (hybrid.is_compact(m)) std::fill_n(work.problem.d_x.row(m), w.width(), 0.0f);
  }
  const int64_t block = cached_rows(w.width(), w.gated() ? 3 : 2);
  for (int64_t block_end = block; block_end - block < w.ffn(); block_end += block) {
    for (int64_t m = begin; m < end; ++m) {
      if (!hybrid.is_compact(m)) continue;
      const int64_t n = entries_below(hybrid, m, work.next[m], block_end) - work.next[m];
      if (n == 0) continue;
      backward_entries(work, m, work.next[m], n, work.factors.row(thread));
      work.next[m] += static_cast<int32_t>(n);
    }
  }
}

// Entries of one neuron, gathered from the rows.
struct NeuronEntries {
  static constexpr int64_t kMax = 256;
  uint32_t token[kMax];
  float d_gate[kMax];
  float d_up[kMax];  // not gated: the gradient in front of the ReLU
  float h[kMax];
};

void gather_entries(const CompactBackward& work, const TransposedEntry* entries, int64_t n,
                    NeuronEntries& out) {
  const bool gated = work.saved.gated();
  for (int64_t i = 0; i < n; ++i) {
    const auto [token, slot] = entries[i];
    const float g = work.saved.hybrid.value(token, slot);
    const float u = gated ? work.saved.up(token, slot) : 1.0f;
    const float d_h = work.d_h(token, slot);
    out.token[i] = token;
    out.d_gate[i] = d_h * u;
    out.d_up[i] = gated ? d_h * g : d_h;
    out.h[i] = g * u;
  }
}

void add_weight_gradients(const CompactBackward& work, const NeuronEntries& entries, int64_t n,
                          int64_t neuron) {
  const FfnTrainBackward& problem = work.problem;
  const FfnGrads& grads = problem.grads;
  if (grads.gated()) {
    gathered_sum2(entries.d_gate, entries.d_up, problem.x, entries.token, n,
                  grads.w_gate.row(neuron), grads.w_up.row(neuron));
  } else {
    gathered_sum(entries.d_up, problem.x, entries.token, n, grads.w_up.row(neuron));
  }
  gathered_sum(entries.h, problem.d_y, entries.token, n, grads.w_down.row(neuron));
}

// Neurons [begin, end), a block of tokens at a time: its x and d_y stay in cache while the neurons
// pass.
void backward_neurons(const CompactBackward& work, const TransposedPattern& pattern,
                      int64_t token_block, int64_t* next, int64_t begin, int64_t end) {
  const int64_t tokens = work.saved.tokens;
  NeuronEntries gathered;
  std::copy(pattern.offset + begin, pattern.offset + end, next + begin);
  for (int64_t block_end = token_block; block_end - token_block < tokens;
       block_end += token_block) {
    for (int64_t neuron = begin; neuron < end; ++neuron) {
      const int64_t last = pattern.offset[neuron + 1];
      while (next[neuron] < last && pattern.entries[next[neuron]].token < block_end) {
        const TransposedEntry* const first = pattern.entries + next[neuron];
        int64_t n = std::min(NeuronEntries::kMax, last - next[neuron]);
        while (first[n - 1].token >= block_end) --n;
        gather_entries(work, first, n, gathered);
        add_weight_gradients(work, gathered, n, neuron);
        next[neuron] += n;
      }
    }
  }
}

// Tokens per block: as many as the cache holds, and at least as many as give a neuron enough
// entries to be worth fetching its three gradient rows.
int64_t token_block_size(int64_t tokens, int64_t width, int64_t ffn, int64_t nnz) {
  constexpr int64_t kEntriesPerNeuron = 16;
  const int64_t for_entries = nnz == 0 ? tokens : kEntriesPerNeuron * tokens * ffn / nnz;
  return std::min(tokens, std::max(cached_rows(width, 2), for_entries));
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
  const int64_t tokens = saved.tokens;
  const int64_t width = problem.x.cols;
  const int64_t ffn = hybrid.shape.cols;
  {
    Arena::Scope scope(ctx.scratch());
    const CompactBackward work = {
        .problem = problem,
        .saved = saved,
        .d_h = scope.matrix<float>(tokens, hybrid.shape.ell_width),
        .next = scope.alloc<int32_t>(tokens),
        .factors = scope.matrix<float>(ctx.threads(), 2 * hybrid.shape.ell_width)};
    parallel_balanced(ctx, row_work(scope, hybrid), tokens,
                      [&](int64_t begin, int64_t end, int thread) {
                        backward_compact_rows(work, begin, end, thread);
                      });
    const TransposedPattern pattern = transpose_pattern(ctx, scope, hybrid);
    const int64_t block = token_block_size(tokens, width, ffn, pattern.offset[ffn]);
    int64_t* const next = scope.alloc<int64_t>(ffn);
    parallel_balanced(ctx, pattern.offset, ffn, [&](int64_t begin, int64_t end, int) {
      backward_neurons(work, pattern, block, next, begin, end);
    });
  }
  if (hybrid.tail_rows > 0) backward_tail(ctx, problem, saved);
}

}  // namespace twell
