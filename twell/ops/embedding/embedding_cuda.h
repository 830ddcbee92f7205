// SPDX-License-Identifier: Apache-2.0
// Token embedding on the GPU: out[m] = scale * table[ids[m]] (launch_embedding), and its backward,
// d_table[ids[m]] += scale * d_out[m]. All in device memory.
//   ids [M] in [0, V), checked by the caller; table [V, D], out, d_out [M, D] bf16; d_table [V, D]
//   f32; D a multiple of 8.
// Backward sorts the tokens by id and sums fixed pieces of the sorted order, without atomics: the
// order of additions depends on the ids alone, and a very frequent token costs no more.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "twell/base/cuda.h"

namespace twell {

// out[m] = scale * table[ids[m]]; ids are in [0, V), D is a multiple of 8. With `drawn`, an id
// below 0 stands for drawn[-1 - id], which is in [0, V) or, where a sampler found no token,
// negative; the result is then row 0.
struct EmbeddingCuda {
  int64_t tokens = 0;                    // M
  int64_t width = 0;                     // D
  const int32_t* ids = nullptr;          // [M]
  const __nv_bfloat16* table = nullptr;  // [V, D]
  __nv_bfloat16* out = nullptr;          // [M, D]
  const int32_t* drawn = nullptr;
  float scale = 1.0f;
};
cudaError_t launch_embedding(const EmbeddingCuda& problem, cudaStream_t stream);

struct EmbeddingBackwardCuda {
  int64_t tokens = 0;                    // M
  int64_t width = 0;                     // D
  int64_t vocab = 0;                     // V
  const int32_t* ids = nullptr;          // [M]
  const __nv_bfloat16* d_out = nullptr;  // [M, D]
  float* d_table = nullptr;              // [V, D] accumulated
  float scale = 1.0f;
};

// Memory for up to max_tokens tokens: one call in flight.
class EmbeddingWorkspaceCuda {
 public:
  EmbeddingWorkspaceCuda(int64_t max_tokens, int64_t width);
  static int64_t bytes_needed(int64_t max_tokens, int64_t width);

 private:
  friend void embedding_backward_cuda(CudaContext& ctx, const EmbeddingBackwardCuda& problem,
                                      const EmbeddingWorkspaceCuda& workspace);
  int64_t max_tokens_;
  int64_t width_;
  DeviceBuffer<int32_t> numbers_;  // [3, M]: 0 .. M - 1, sorted ids, their tokens
  DeviceBuffer<float> borders_;    // sums of runs of one id that cross pieces
  DeviceBuffer<std::byte> sort_memory_;
};

// Error if the workspace is too small or D is not a multiple of 8. Never synchronises.
void embedding_backward_cuda(CudaContext& ctx, const EmbeddingBackwardCuda& problem,
                             const EmbeddingWorkspaceCuda& workspace);

}  // namespace twell
