// SPDX-License-Identifier: Apache-2.0
// Token embedding on the GPU: out[m] = table[ids[m]]. All in device memory.
//   ids [M] in [0, V), checked by the caller; table [V, D], out [M, D] bf16; D a multiple of 8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace twell {

struct EmbeddingCuda {
  int64_t tokens = 0;                    // M
  int64_t width = 0;                     // D
  const int32_t* ids = nullptr;          // [M]
  const __nv_bfloat16* table = nullptr;  // [V, D]
  __nv_bfloat16* out = nullptr;          // [M, D]
};
cudaError_t launch_embedding(const EmbeddingCuda& problem, cudaStream_t stream);

}  // namespace twell
