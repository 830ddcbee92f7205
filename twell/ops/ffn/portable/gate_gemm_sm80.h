// SPDX-License-Identifier: Apache-2.0
// Launch of the portable gate GEMM.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace twell::gate_gemm_sm80 {

inline constexpr int kTileM = 128;
inline constexpr int kTileN = 256;  // the TwELL tile

struct Params {
  const __nv_bfloat16* x;  // [M, D]
  const __nv_bfloat16* w;  // [F, D]
  uint32_t* words;         // [M, tiles, slots]
  uint4* spill;            // [M * tiles, 32] eight bf16 each
  int32_t* row_nnz;        // [M], starts at 0
  int tokens, width, ffn;
  int m_tiles, n_tiles;  // n_tiles: also TwELL's per row
  int slots;             // words per (row, tile)
};

cudaError_t launch_gate_gemm_sm80(const Params& params, cudaStream_t stream);

}  // namespace twell::gate_gemm_sm80
