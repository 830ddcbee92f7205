// SPDX-License-Identifier: Apache-2.0
// Gate projection with ReLU and TwELL output, on the GPU, bf16: g = relu(x w_gate^T), packed tile
// by tile in the GEMM's epilogue, so that g never exists as a matrix. Non-zeros of a (row, tile)
// are stored in an order that depends on the sizes and the device alone, not in column order. An
// overflowing tile is spilled to slot row * tiles + tile. A NaN gate counts as active.
// Deterministic. Never synchronises; can be captured in a CUDA graph.
#pragma once

#include <cuda_bf16.h>

#include <string>

#include "twell/base/cuda.h"
#include "twell/format/twell.h"

namespace twell {

// Progress of the gate GEMM, so that the next kernel can start on packed tiles. Device memory,
// zeroed before the GEMM starts; words[p] counts CTAs that have packed all of phase p (GatePhases).
struct GateProgress {
  static constexpr int kPhases = 4;
  int32_t* words = nullptr;  // null: not published
  int64_t size = 0;          // at least kPhases; the rest belongs to the caller
};
struct GatePhases {
  int ctas;
  int tokens[GateProgress::kPhases];  // once words[p] is `ctas`, all tokens below are packed; the
                                      // last one is M
};

// All pointers are device memory, matrices contiguous row-major, 16-byte aligned.
struct GateGemmCuda {
  int64_t tokens = 0;                     // M
  int64_t width = 0;                      // D, a multiple of 8
  int64_t ffn = 0;                        // F, a multiple of 8
  const __nv_bfloat16* x = nullptr;       // [M, D]
  const __nv_bfloat16* w_gate = nullptr;  // [F, D]
  TwellPacked out;  // shape [M, F], T = 256; spill [M * tiles, 256]; row_nnz [M], written
  const int32_t* condition = nullptr;  // device memory: if it holds 0, nothing is computed
  GateProgress progress{};             // not combined with a condition
};

// Why the problem cannot run on this context's device; empty when it can.
std::string gate_gemm_unsupported(const CudaContext& ctx, const GateGemmCuda& problem);

// What the words of GateProgress mean for these sizes.
GatePhases gate_gemm_phases(const CudaContext& ctx, int64_t tokens, int64_t ffn);

// Throws Error where unsupported.
void gate_gemm_cuda(CudaContext& ctx, const GateGemmCuda& problem);

// The same on mma.sync, for GPUs of compute capability 8.0 or later, with non-zeros in column
// order; without progress and condition.
// Why the problem cannot run on this context's device; empty when it can.
std::string gate_gemm_sm80_unsupported(const CudaContext& ctx, const GateGemmCuda& problem);

// Throws Error where unsupported.
void gate_gemm_sm80_cuda(CudaContext& ctx, const GateGemmCuda& problem);

}  // namespace twell
