// SPDX-License-Identifier: Apache-2.0
// Launches of the row-fused kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/format/activity_cuda.h"

namespace twell::row_fused {

// A warp lists this many non-zeros at a time; a row with more is heavy.
inline constexpr int kListed = 64;
// Columns that a warp accumulates: 64 f32 per lane. A wider y is computed in chunks, each of which
// computes h again.
inline constexpr int kChunk = 2048;
// With fewer heavy rows than this, rows are split into parts, so that about as many CTAs have work.
inline constexpr int kSplitTarget = 264;
inline constexpr int kMaxParts = 16;
// Parts of all split rows together: ceil(kSplitTarget / n) * n < kSplitTarget + n, n <
// kSplitTarget.
inline constexpr int kMaxPartials = 2 * kSplitTarget;

struct Counters {
  int32_t heavy_rows;  // 0 between calls
  int32_t ctas_done;   // 0 between calls
};

struct Problem {
  const uint32_t* words;   // TwELL [M, col_tiles, slots], T = 256
  const uint16_t* spill;   // [spill slots, 256]
  const int32_t* row_nnz;  // [M]
  int64_t rows;            // M
  int col_tiles;
  int slots;
  const __nv_bfloat16* x;       // [M, D]
  const __nv_bfloat16* w_up;    // [F, D], null without a gate
  const __nv_bfloat16* w_down;  // [F, D]
  __nv_bfloat16* y;             // [M, D]
  int width;                    // D
  int chunks;                   // ceil(D / kChunk)
  int32_t* heavy_rows;          // [M]
  Counters* counters;
  int32_t* parts_done;  // [kSplitTarget * chunks], 0 between calls
  float* partials;      // [kMaxPartials, D]
  bool add;             // y += instead of =
};

cudaError_t launch_light_rows(const Problem& problem, cudaStream_t stream);
cudaError_t launch_heavy_rows(const Problem& problem, int multiprocessors, cudaStream_t stream);

// Adds the counts of a packed gate's rows to a layer's. row_nnz [tokens], device memory.
cudaError_t launch_count_rows(const int32_t* row_nnz, int64_t tokens, ActivityCuda* activity,
                              cudaStream_t stream);

}  // namespace twell::row_fused
