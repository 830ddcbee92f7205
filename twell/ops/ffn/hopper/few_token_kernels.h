// SPDX-License-Identifier: Apache-2.0
// The kernels of the few-token layer: what the host side passes to them, and their launches.
// Two kinds: for up to 8 tokens a CTA owns neurons, with their rows whole; for 9 to 64 a cluster of
// four CTAs does, which share out the width.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/format/activity_cuda.h"

namespace twell::few_token {

inline constexpr int kRowTokens = 8;     // at most, of a CTA with whole rows
inline constexpr int kMaxRows = 48;      // of such a CTA at a time
inline constexpr int kSplitTokens = 64;  // at most, of a cluster
inline constexpr int kMaxNeurons = 192;  // of a cluster at a time
// Neurons of a cluster that a word of Fired tells of.
inline constexpr int kWordNeurons = 32;

// What one kernel of a layer tells the other. Between calls no word is announced, `arrived` is 0.
struct Hidden {
  __nv_bfloat16* h;   // [F, 8 or 64], written for neurons that fire; 0 past the tokens
  uint64_t* fired;    // [ceil(F / n)], n neurons a word from bit 0 on (fired_words_sm90.cuh)
  uint32_t* arrived;  // CTAs that have read all words
};

// Up to 8 tokens. The first weight is w_gate, or w_up without a gate.
struct RowGateUp {
  const __nv_bfloat16* x;      // [M, D]
  const __nv_bfloat16* norm;   // [D] weight of the norm of x, or null
  const __nv_bfloat16* first;  // [F, D]
  const __nv_bfloat16* up;     // [F, D], null without a gate
  const __nv_bfloat16* down;   // [F, D] rows of neurons that fire are brought into the L2
  Hidden hidden;               // `rows` neurons a word
  ActivityCuda* activity;      // null: not wanted
  float eps;                   // of the norm
  int tokens, width, ffn;
  int rows;            // of a CTA at a time, at most kMaxRows
  bool early_weights;  // the first weight may be read before the kernel in front has finished
};

struct GateUp {
  const __nv_bfloat16* up;    // [F, D], null without a gate
  const __nv_bfloat16* down;  // [F, D] rows of neurons that fire are brought into the L2
  Hidden hidden;              // kWordNeurons a word
  ActivityCuda* activity;     // null: not wanted
  int tokens, width, ffn;
  bool early_weights;  // the first weight may be read before the kernel in front has finished
};

// 9 to 64 tokens. The first weight is w_gate, or w_up without a gate.
struct SplitGateUp {
  CUtensorMap map_x;      // [M, D] in boxes of 64 rows
  CUtensorMap map_first;  // [F, D] in boxes of neurons / 2 rows
  GateUp problem;
  int neurons;       // of a cluster at a time: a multiple of 64, at most kMaxNeurons
  int slice_chunks;  // of 64 values of k, that a CTA of a cluster has: a quarter of the width
};

struct Down {
  Hidden hidden;
  const __nv_bfloat16* weight;    // [F, D]
  const __nv_bfloat16* residual;  // [M, D], may be y; or null
  __nv_bfloat16* y;               // [M, D]
  int tokens, width, ffn;
  int word_neurons;  // that a word of hidden.fired tells of
};

// A CTA for each of the words of `fired`, at most `ctas`.
cudaError_t launch_row_gate_up_sm90(const RowGateUp& problem, int ctas, cudaStream_t stream);
// Clusters of the kernel that the device runs at one time.
cudaError_t count_gate_up_clusters_sm90(int* clusters);
cudaError_t launch_gate_up_sm90(const SplitGateUp& params, int clusters, cudaStream_t stream);
// Right after the kernel that makes `hidden` on the same stream, beside which they run: up to 8
// tokens, and 9 to 64.
cudaError_t launch_row_down_sm90(const Down& problem, cudaStream_t stream);
cudaError_t launch_split_down_sm90(const Down& problem, cudaStream_t stream);

}  // namespace twell::few_token
