// SPDX-License-Identifier: Apache-2.0
// The gated feed-forward layer behind a rotated screen (rotated_screen.h), on Hopper, bf16
// with f32 accumulation, for 65 tokens and more:
//   screen     the 8-bit product of x and w_gate, whose epilogue writes a bit per token and neuron:
//              may the neuron fire?
//   unions     per tile of 128 tokens, the union of the candidates (find_unions)
//   gate_up    h = f(relu(x w_gate[union]^T)) * (x w_up[union]^T): both products from one gathered
//              tile; the gate is summed in the order of the gate GEMM and rounded as there, so that
//              candidates that do not fire have h = 0
//   down       y = h w_down[union]
// Deterministic. Never synchronises; can be captured in a CUDA graph.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "twell/base/cuda.h"
#include "twell/format/activity_cuda.h"
#include "twell/format/twell.h"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"
#include "twell/ops/ffn/screened/rotated_screen.h"
#include "twell/ops/ffn/tile_union/tile_union_cuda.h"

namespace twell {

// The candidates of [M, F] in device memory. Of each (token, tile of 256 neurons), bit i of word
// 2 t + h is the neuron 8 i + 2 t + h of the tile, as WGMMA's accumulators lie in a quad of lanes.
// Bits past F are 0.
struct CandidatesCuda {
  uint32_t* words = nullptr;     // [M, ceil(F / 256), 8]
  int32_t* row_count = nullptr;  // [M] candidates of a token
};

// All pointers are device memory, matrices contiguous row-major, 16-byte aligned.
struct ScreenGemmCuda {
  int64_t tokens = 0;    // M
  int64_t width = 0;     // D; can_rotate(D)
  int64_t ffn = 0;       // F, a multiple of 8
  RotatedRowsCuda x;     // [M, D]
  RotatedGateCuda gate;  // [F, D]
  CandidatesCuda out;
  GateProgress progress{};  // words that are cleared first
};
void screen_gemm_cuda(CudaContext& ctx, const ScreenGemmCuda& problem);

// Adds to activity which of the gate's non-zeros are no candidates: `gate` is the packed gate of
// the tokens whose candidates begin at `words`, [M, F] with T = 256.
cudaError_t launch_check_screen(const TwellPacked& gate, const uint32_t* words,
                                ActivityCuda* activity, cudaStream_t stream);

struct ScreenedFfnCuda {
  int64_t tokens = 0;                     // M
  int64_t width = 0;                      // D, a multiple of 16
  int64_t ffn = 0;                        // F, a multiple of 8
  RotatedRowsCuda rotated;                // [M, D] of x
  RotatedGateCuda screen;                 // [F, D] of w_gate
  const __nv_bfloat16* x = nullptr;       // [M, D]
  const __nv_bfloat16* w_gate = nullptr;  // [F, D]
  const __nv_bfloat16* w_up = nullptr;    // [F, D]
  const __nv_bfloat16* w_down = nullptr;  // [F, D]
  __nv_bfloat16* y = nullptr;             // [M, D], every element written; overlaps nothing
  bool add = false;                       // y += instead of =
  bool squared = false;                   // f(g) = g^2
  bool up_relu = false;                   // dReLU
  uint32_t cut = 0;                  // of FATReLU; candidates are those of ReLU, which are more
  const int32_t* y_rows = nullptr;   // [M] row of y of each row of x; null: its own
  CandidatesCuda candidates;         // [M, F] memory to work in
  int32_t* row_nnz = nullptr;        // [M] out: active neurons of each token, or null
  ActivityCuda* activity = nullptr;  // added to; may be null
};

void screened_ffn_cuda(CudaContext& ctx, const ScreenedFfnCuda& problem,
                       TileUnionWorkspace& workspace);

}  // namespace twell
