// SPDX-License-Identifier: Apache-2.0
// Up and down on packed gates, on the GPU, bf16 with f32 accumulation, in two executions:
//   gated:      h = f(g) * (x w_up^T) on the active neurons, y = h w_down
//   non-gated:  h = f(g), y = h w_down
// g is the packed ReLU or FATReLU; f(g) is g, or g^2 for relu2. With up_relu (dReLU) the ReLU of
// the product with w_up stands in its place.
//
// Tile-union (Hopper) cuts the tokens into tiles of 128. The union of a tile's active neurons is
// compacted, and its weight rows are gathered into two small dense GEMMs on the tensor cores. Heavy
// rows, far above the mean (the first tokens of a sequence), would swell the union of every tile
// they are in, so they get tiles of their own. A tile whose union is all of F costs what the dense
// layer costs.
// Row-fused works token by token: dot product of x with a neuron's row of w_up, times g, times its
// row of w_down, added to y. It runs on any GPU of compute capability 8.0 or later, and is best
// where few neurons are active per token and neighbouring tokens share none. h is rounded to bf16
// but stays in registers. Rows with more than 64 non-zeros are spread over many warps; partial sums
// of a row are added in an order that depends on the number of such rows alone.
// Both are exact on every input and deterministic, never synchronise, and can be captured in a CUDA
// graph.
// Errors are those of gate/gate_gemm_cuda.h.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "twell/format/activity_cuda.h"
#include "twell/format/byte_matrix_cuda.h"
#include "twell/format/twell.h"

namespace twell {

// All pointers are device memory, matrices contiguous row-major, 16-byte aligned.
struct SparseUpDownCuda {
  int64_t tokens = 0;                     // M
  int64_t width = 0;                      // D, a multiple of 8
  int64_t ffn = 0;                        // F, a multiple of 8
  TwellPacked gate;                       // [M, F], T = 256, any order within a tile; row_nnz set
  const __nv_bfloat16* x = nullptr;       // [M, D]; not read without a gate
  const __nv_bfloat16* w_up = nullptr;    // [F, D], or null: no gate
  const __nv_bfloat16* w_down = nullptr;  // [F, D]
  __nv_bfloat16* y = nullptr;             // [M, D], every element written; overlaps nothing
  bool add = false;                       // y += instead of =
  bool squared = false;                   // f(g) = g^2
  bool up_relu = false;
  const int32_t* y_rows = nullptr;   // [M] row of y of each row of x; null: its own
  ActivityCuda* activity = nullptr;  // added to; may be null
  // The gate comes from a gate GEMM of these sizes, directly before on this stream, which was given
  // the workspace's progress(tokens). Then this call starts while the gate GEMM runs. Gated only.
  bool follows_gate = false;
  // x [M, D], w_up and w_down [F, D] in e4m3, in place of those in bf16; D is a multiple of 16.
  // Gated, and tile-union alone. h is in e4m3 too, with an exponent for each token and at most 192
  // neurons of its union.
  ByteRowsCuda x_bytes, w_up_bytes;
  const float* y_scales = nullptr;  // [D] scales of the columns of w_down; null: none
  const uint8_t* w_down_bytes = nullptr;
  bool in_bytes() const { return !x_bytes.empty(); }
  bool gated() const { return w_up != nullptr || in_bytes(); }
};

}  // namespace twell
