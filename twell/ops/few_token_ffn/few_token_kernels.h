// SPDX-License-Identifier: Apache-2.0
// The kernels of the few-token layer: what the host side passes to them, and their launches.
// For up to 8 tokens the first one is few_rows' (few_rows.h).
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/format/activity_cuda.h"

namespace twell::few_token {

inline constexpr int kMaxNeurons = 192;  // of a cluster at a time
inline constexpr int kTileTokens = 64;   // from 9 tokens on h has rows of whole tiles

struct GateUp {
  const __nv_bfloat16* up;    // [F, D], null without a gate
  const __nv_bfloat16* down;  // [F, D] rows of neurons that fire are brought into the L2
  __nv_bfloat16* hidden;      // [F, tiles * 64], written for neurons that fire
  uint32_t* fired;            // [ceil(F / 32)] a bit per neuron
  ActivityCuda* activity;     // null: not wanted
  int tokens, width, ffn;
  bool early_weights;  // the first weight may be read before the kernel in front has finished
};

// 9 tokens and more. The first weight is w_gate, or w_up without a gate.
struct SplitGateUp {
  CUtensorMap map_x;      // [M, D] in boxes of 64 rows
  CUtensorMap map_first;  // [F, D] in boxes of neurons / 2 rows
  GateUp problem;
  int neurons;       // of a cluster at a time: a multiple of 64, at most kMaxNeurons
  int slice_chunks;  // of 64 values of k, that a CTA of a cluster has: a quarter of the width
};

struct Down {
  const __nv_bfloat16* hidden;    // [F, 8], or [F, tiles * 64] from 9 tokens on
  const uint32_t* fired;          // [ceil(F / 32)] a bit per neuron
  const __nv_bfloat16* weight;    // [F, D]
  const __nv_bfloat16* residual;  // [M, D], may be y; or null
  __nv_bfloat16* y;               // [M, D]
  int tokens, width, ffn;
};

// Clusters of the kernel that the device runs at one time.
cudaError_t count_gate_up_clusters_sm90(int tiles, int* clusters);
cudaError_t launch_gate_up_sm90(const SplitGateUp& params, int tiles, int clusters,
                                cudaStream_t stream);
// Right after the kernel that made `hidden` on the same stream, whose tail they overlap: up to 8
// tokens, and 9 and more.
cudaError_t launch_down_sm90(const Down& problem, cudaStream_t stream);
cudaError_t launch_split_down_sm90(const Down& problem, int tiles, cudaStream_t stream);

}  // namespace twell::few_token
