// SPDX-License-Identifier: Apache-2.0
// The gate GEMM of the sparse feed-forward layer on the GPU, whose epilogue packs its result into
// TwELL. Error on another device than stated, a D or F that is no positive multiple of 8, another
// TwELL than stated, or a call larger than its workspace. The rows of registry.h limit D and F to
// what the kernels count in 32 bits.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "twell/base/cuda.h"
#include "twell/format/byte_matrix_cuda.h"
#include "twell/format/twell.h"

namespace twell {

// Throw these errors. `portable` kernels run from compute capability 8.0 on, others on Hopper
// alone.
void check_ffn_call(const CudaContext& ctx, int64_t width, int64_t ffn, bool portable = false);
void check_packed_ffn(const CudaContext& ctx, int64_t tokens, int64_t width, int64_t ffn,
                      const TwellPacked& gate, bool portable = false);

// Gate projection with ReLU and TwELL output, on the GPU, bf16: g = relu(x w_gate^T), packed tile
// by tile in the GEMM's epilogue, so that g never exists as a matrix. Non-zeros of a (row, tile)
// are stored in an order that depends on the sizes and the device alone, not in column order. An
// overflowing tile is spilled to slot row * tiles + tile. A NaN gate counts as active.
// Deterministic. Never synchronises; can be captured in a CUDA graph.

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
  uint32_t cut = 0;                    // of FATReLU, see bf16_cut
  // x [M, D] and w_gate [F, D] in e4m3, in place of those in bf16; D is a multiple of 16. The
  // scales multiply the sums before ReLU. Hopper alone.
  ByteRowsCuda x_bytes, w_gate_bytes;
  bool in_bytes() const { return !x_bytes.empty(); }
};

// What the words of GateProgress mean for these sizes.
GatePhases gate_gemm_phases(const CudaContext& ctx, int64_t tokens, int64_t ffn);

void gate_gemm_cuda(CudaContext& ctx, const GateGemmCuda& problem);

// The same on mma.sync, for GPUs of compute capability 8.0 or later; without progress.
void gate_gemm_sm80_cuda(CudaContext& ctx, const GateGemmCuda& problem);

// Clears counts [rows] and `words` words of progress in front of a GEMM that adds to them and is
// launched as its dependent. The GEMM may start while this kernel runs, but not before all earlier
// work is complete.
cudaError_t launch_clear_counts(int32_t* counts, int64_t rows, int32_t* progress, int64_t words,
                                cudaStream_t stream);

}  // namespace twell
