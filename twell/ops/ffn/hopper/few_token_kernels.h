// SPDX-License-Identifier: Apache-2.0
// Launches of the kernels for decode rows (1 to 8 tokens, decode_rows_sm90.cu: a CTA owns whole
// rows of neurons) and small batches (9 to 64 tokens, small_batch_sm90.cu: a cluster of four CTAs
// owns neurons and splits the width).
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/format/activity_cuda.h"

namespace twell::few_token {

inline constexpr int kRowTokens = 8;     // most tokens of decode rows
inline constexpr int kMaxRows = 48;      // most rows of a CTA at a time
inline constexpr int kSplitTokens = 64;  // most tokens of a small batch
inline constexpr int kMaxNeurons = 192;  // most neurons of a cluster at a time
// Neurons per word of Hidden::fired in a small batch.
inline constexpr int kWordNeurons = 32;

// What the first kernel passes to the second. All words and `arrived` are 0 between calls.
struct Hidden {
  __nv_bfloat16* h;   // [F, 8 or 64], written for active neurons; 0 past the tokens
  uint64_t* fired;    // [ceil(F / n)] n neurons per word from bit 0 on (fired_words_sm90.cuh)
  uint32_t* arrived;  // CTAs that have read all words
};

// Decode rows. The first weight is w_gate, or w_up without a gate.
struct RowGateUp {
  const __nv_bfloat16* x;      // [M, D]
  const __nv_bfloat16* norm;   // [D] weight of the norm of x, or null
  const __nv_bfloat16* first;  // [F, D]
  const __nv_bfloat16* up;     // [F, D], null without a gate
  const __nv_bfloat16* down;   // [F, D] rows of active neurons are prefetched into the L2
  Hidden hidden;               // `rows` neurons per word
  ActivityCuda* activity;      // counts, or null
  float eps;                   // of the norm
  int tokens, width, ffn;
  int rows;            // neurons of a CTA at a time, at most kMaxRows
  bool early_weights;  // the first weight may be read before the predecessor has finished
};

struct GateUp {
  const __nv_bfloat16* up;    // [F, D], null without a gate
  const __nv_bfloat16* down;  // [F, D] rows of active neurons are prefetched into the L2
  Hidden hidden;              // kWordNeurons per word
  ActivityCuda* activity;     // counts, or null
  int tokens, width, ffn;
  bool early_weights;  // the first weight may be read before the predecessor has finished
};

// A small batch. The first weight is w_gate, or w_up without a gate.
struct SplitGateUp {
  CUtensorMap map_x;      // [M, D] in boxes of 64 rows
  CUtensorMap map_first;  // [F, D] in boxes of neurons / 2 rows
  GateUp problem;
  int neurons;       // neurons of a cluster at a time: a multiple of 64, at most kMaxNeurons
  int slice_chunks;  // chunks of 64 columns per CTA of a cluster: a quarter of the width
};

struct Down {
  Hidden hidden;
  const __nv_bfloat16* weight;    // [F, D]
  const __nv_bfloat16* residual;  // [M, D], may be y; or null
  __nv_bfloat16* y;               // [M, D]
  int tokens, width, ffn;
  int word_neurons;  // neurons per word of hidden.fired
};

// One CTA per word of `fired`, at most `ctas`.
cudaError_t launch_row_gate_up_sm90(const RowGateUp& problem, int ctas, cudaStream_t stream);
// Number of clusters of the kernel that fit into the device at one time.
cudaError_t count_gate_up_clusters_sm90(int* clusters);
cudaError_t launch_gate_up_sm90(const SplitGateUp& params, int clusters, cudaStream_t stream);
// Launch right after the kernel that computes `hidden`, on the same stream; the two run side by
// side. The first is for decode rows, the second for small batches.
cudaError_t launch_row_down_sm90(const Down& problem, cudaStream_t stream);
cudaError_t launch_split_down_sm90(const Down& problem, cudaStream_t stream);

}  // namespace twell::few_token
