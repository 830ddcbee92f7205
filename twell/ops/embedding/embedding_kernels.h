// SPDX-License-Identifier: Apache-2.0
// The launches of embedding_cuda.h, as plain types that nvcc compiles.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace twell {

// out[m] = table[ids[m]]; ids are in [0, V), D is a multiple of 8. With `drawn`, an id below 0
// stands for drawn[-1 - id], which is in [0, V) or, where a sampler found no token, negative; the
// result is then row 0.
struct EmbeddingCuda {
  int64_t tokens = 0;                    // M
  int64_t width = 0;                     // D
  const int32_t* ids = nullptr;          // [M]
  const __nv_bfloat16* table = nullptr;  // [V, D]
  __nv_bfloat16* out = nullptr;          // [M, D]
  const int32_t* drawn = nullptr;
};
cudaError_t launch_embedding(const EmbeddingCuda& problem, cudaStream_t stream);

inline constexpr int64_t kEmbeddingPiece = 32;  // sorted tokens that one block sums

struct TokenSort {
  int64_t tokens = 0;                // M
  int64_t vocab = 0;                 // ids are below it
  const int32_t* ids = nullptr;      // [M]
  int32_t* iota = nullptr;           // [M] workspace
  int32_t* sorted_ids = nullptr;     // [M] out
  int32_t* sorted_tokens = nullptr;  // [M] out: token of each sorted id, ascending within an id
  void* memory = nullptr;
  size_t memory_bytes = 0;
};
cudaError_t token_sort_bytes(int64_t tokens, size_t* bytes);
cudaError_t launch_token_sort(const TokenSort& problem, cudaStream_t stream);

// Two kernels: pieces, then the runs that cross their borders.
struct EmbeddingSums {
  int64_t tokens = 0;
  int64_t width = 0;
  const int32_t* sorted_ids = nullptr;
  const int32_t* sorted_tokens = nullptr;
  const __nv_bfloat16* d_out = nullptr;  // [M, D]
  float* borders = nullptr;              // [pieces, 2, D]: of a piece's first and last run
  float* d_table = nullptr;              // [V, D]
};
cudaError_t launch_embedding_sums(const EmbeddingSums& problem, cudaStream_t stream);

}  // namespace twell
