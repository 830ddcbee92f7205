// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/embedding/embedding_cuda.h"

namespace twell {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kPiece = 8;  // values in one 16-byte access

__global__ void __launch_bounds__(kThreads) embedding_kernel(EmbeddingCuda p) {
  const int64_t pieces = p.width / kPiece;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.tokens * pieces) return;
  const int64_t row = int64_t{p.ids[i / pieces]};
  reinterpret_cast<uint4*>(p.out)[i] =
      reinterpret_cast<const uint4*>(p.table)[row * pieces + i % pieces];
}

}  // namespace

cudaError_t launch_embedding(const EmbeddingCuda& p, cudaStream_t stream) {
  const int64_t pieces = p.tokens * (p.width / kPiece);
  if (pieces == 0) return cudaSuccess;
  embedding_kernel<<<static_cast<unsigned>((pieces + kThreads - 1) / kThreads), kThreads, 0,
                     stream>>>(p);
  return cudaGetLastError();
}

}  // namespace twell
