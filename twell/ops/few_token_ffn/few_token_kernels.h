// SPDX-License-Identifier: Apache-2.0
// The two kernels of the few-token layer: what the host side passes to them, and their launches.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/format/activity_cuda.h"

namespace twell::few_token {

inline constexpr int kGroup = 16;  // neurons that a warp multiplies at a time

// Tokens are handled in tiles of 8: 2, 4 or 8 of them here, a single one in few_rows.h.
inline int token_tiles(int64_t tokens) {
  int tiles = 2;
  while (tiles * 8 < tokens) tiles *= 2;
  return tiles;
}

struct GateUp {
  const __nv_bfloat16* x;      // [M, D]
  const __nv_bfloat16* first;  // [F, D] w_gate, or w_up without a gate
  const __nv_bfloat16* up;     // [F, D], null without a gate
  const __nv_bfloat16* down;   // [F, D] rows of neurons that fire are brought into the L2
  __nv_bfloat16* hidden;       // [F, tiles * 8], written for neurons that fire
  uint16_t* fired;             // [ceil(F / 16) rounded up to 2] a bit per neuron
  ActivityCuda* activity;      // null: not wanted
  int tokens, width, ffn;
  bool early_weights;  // launched before the kernel in front has finished
};

struct Down {
  const __nv_bfloat16* hidden;    // [F, tiles * 8]
  const uint32_t* fired;          // [ceil(F / 32)] a bit per neuron
  const __nv_bfloat16* weight;    // [F, D]
  const __nv_bfloat16* residual;  // [M, D], may be y; or null
  __nv_bfloat16* y;               // [M, D]
  int tokens, width, ffn;
  int tiles;
};

cudaError_t launch_gate_up_sm90(const GateUp& problem, int multiprocessors, cudaStream_t stream);
// Right after the kernel that made `hidden` on the same stream, whose tail it overlaps.
cudaError_t launch_down_sm90(const Down& problem, cudaStream_t stream);

}  // namespace twell::few_token
