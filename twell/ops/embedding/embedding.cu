// SPDX-License-Identifier: Apache-2.0
#include <cub/device/device_radix_sort.cuh>

#include "twell/base/for_each.cuh"
#include "twell/ops/embedding/embedding_cuda.h"

namespace twell {
namespace {

constexpr int kEmbeddingThreads = 256;
constexpr int kColumns = 8;  // values per thread: one 16-byte access

// One 16-byte piece of a row.
struct CopyPiece {
  EmbeddingCuda p;
  __device__ void operator()(int64_t i) const {
    const int64_t pieces = p.width / kColumns;
    int32_t id = p.ids[i / pieces];
    if (id < 0) id = max(p.drawn[-1 - id], 0);
    const int64_t row = int64_t{id};
    uint4 piece = reinterpret_cast<const uint4*>(p.table)[row * pieces + i % pieces];
    if (p.scale != 1.0f) {
      auto* const pairs = reinterpret_cast<__nv_bfloat162*>(&piece);
#pragma unroll
      for (int k = 0; k < kColumns / 2; ++k) {
        const float2 v = __bfloat1622float2(pairs[k]);
        pairs[k] = __floats2bfloat162_rn(p.scale * v.x, p.scale * v.y);
      }
    }
    reinterpret_cast<uint4*>(p.out)[i] = piece;
  }
};

// Backward.

constexpr int kEmbeddingPiece = 32;  // sorted tokens that one block sums
constexpr int kAhead = 4;            // rows whose loads are in flight together

struct EmbeddingSums {
  int64_t tokens = 0;
  int64_t width = 0;
  const int32_t* sorted_ids = nullptr;
  const int32_t* sorted_tokens = nullptr;  // of each sorted id, ascending within an id
  const __nv_bfloat16* d_out = nullptr;    // [M, D]
  float* borders = nullptr;                // [pieces, 2, D]: of a piece's first and last run
  float* d_table = nullptr;                // [V, D]
  float scale = 1.0f;
};

struct alignas(16) EmbeddingPiece {
  __nv_bfloat162 pair[kColumns / 2];
};

struct Sums {
  float value[kColumns];

  __device__ void clear() {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) value[k] = 0.0f;
  }
  __device__ void add(const EmbeddingPiece& row) {
#pragma unroll
    for (int k = 0; k < kColumns / 2; ++k) {
      const float2 v = __bfloat1622float2(row.pair[k]);
      value[2 * k] += v.x;
      value[2 * k + 1] += v.y;
    }
  }
  __device__ void add(const float* row) {
    const float4 a = reinterpret_cast<const float4*>(row)[0];
    const float4 b = reinterpret_cast<const float4*>(row)[1];
    value[0] += a.x, value[1] += a.y, value[2] += a.z, value[3] += a.w;
    value[4] += b.x, value[5] += b.y, value[6] += b.z, value[7] += b.w;
  }
  __device__ void store(float* row) const {
    reinterpret_cast<float4*>(row)[0] = {value[0], value[1], value[2], value[3]};
    reinterpret_cast<float4*>(row)[1] = {value[4], value[5], value[6], value[7]};
  }
  // row += scale * these sums
  __device__ void add_to(float* row, float scale) const {
    Sums sum = *this;
#pragma unroll
    for (float& v : sum.value) v *= scale;
    sum.add(row);
    sum.store(row);
  }
};

struct Iota {
  int32_t* out;
  __device__ void operator()(int64_t i) const { out[i] = static_cast<int32_t>(i); }
};

// Block (piece, columns). A run of one id inside the piece is added to the table. A run that
// continues from the previous piece goes to the piece's first border row, else one that continues
// into the next piece to its last border row.
__global__ void __launch_bounds__(kEmbeddingThreads) piece_kernel(EmbeddingSums p) {
  __shared__ int32_t ids[kEmbeddingPiece + 1], tokens[kEmbeddingPiece];
  const int64_t begin = int64_t{blockIdx.x} * kEmbeddingPiece;
  const int count =
      static_cast<int>(p.tokens - begin < kEmbeddingPiece ? p.tokens - begin : kEmbeddingPiece);
  for (int i = static_cast<int>(threadIdx.x); i <= kEmbeddingPiece; i += kEmbeddingThreads) {
    ids[i] = begin + i < p.tokens ? p.sorted_ids[begin + i] : -1;
    if (i < count) tokens[i] = p.sorted_tokens[begin + i];
  }
  __syncthreads();
  const bool continues = begin > 0 && p.sorted_ids[begin - 1] == ids[0];
  const int64_t column = (int64_t{blockIdx.y} * kEmbeddingThreads + threadIdx.x) * kColumns;
  if (column >= p.width) return;
  float* const borders = p.borders + int64_t{blockIdx.x} * 2 * p.width + column;

  int first = 0;  // first token of the run
  Sums sums;
  sums.clear();
  for (int at = 0; at < count; at += kAhead) {
    EmbeddingPiece rows[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (at + k >= count) break;
      rows[k] =
          *reinterpret_cast<const EmbeddingPiece*>(p.d_out + tokens[at + k] * p.width + column);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int i = at + k;
      if (i >= count) break;
      sums.add(rows[k]);
      const bool last = i + 1 == count;
      if (!last && ids[i + 1] == ids[i]) continue;
      if (first == 0 && continues) {
        sums.store(borders);
      } else if (last && ids[i + 1] == ids[i]) {
        sums.store(borders + p.width);
      } else {
        sums.add_to(p.d_table + ids[i] * p.width + column, p.scale);
      }
      first = i + 1;
      sums.clear();
    }
  }
}

// Block (piece, columns): if the piece's last run begins in it and continues, adds up its sums over
// the following pieces in order.
__global__ void __launch_bounds__(kEmbeddingThreads) border_kernel(EmbeddingSums p) {
  const int64_t next = (int64_t{blockIdx.x} + 1) * kEmbeddingPiece;  // begin of the next piece
  if (next >= p.tokens) return;
  const int32_t id = p.sorted_ids[next];
  if (p.sorted_ids[next - 1] != id) return;
  const int64_t begin = next - kEmbeddingPiece;
  if (begin > 0 && p.sorted_ids[begin] == id && p.sorted_ids[begin - 1] == id) return;
  const int64_t column = (int64_t{blockIdx.y} * kEmbeddingThreads + threadIdx.x) * kColumns;
  if (column >= p.width) return;
  Sums sums;
  sums.clear();
  sums.add(p.borders + (int64_t{blockIdx.x} * 2 + 1) * p.width + column);
#pragma unroll 4
  for (int64_t at = next; at < p.tokens && p.sorted_ids[at] == id; at += kEmbeddingPiece) {
    sums.add(p.borders + at / kEmbeddingPiece * 2 * p.width + column);
  }
  sums.add_to(p.d_table + id * p.width + column, p.scale);
}

int bits_of(int64_t values) {
  int bits = 1;
  while ((int64_t{1} << bits) < values) ++bits;
  return bits;
}

int64_t border_values(int64_t tokens, int64_t width) {
  return 2 * ((tokens + kEmbeddingPiece - 1) / kEmbeddingPiece) * width;
}

// Two kernels: pieces, then the runs that cross their borders.
cudaError_t launch_embedding_sums(const EmbeddingSums& p, cudaStream_t stream) {
  const int64_t columns = kEmbeddingThreads * kColumns;
  const dim3 grid(static_cast<unsigned>((p.tokens + kEmbeddingPiece - 1) / kEmbeddingPiece),
                  static_cast<unsigned>((p.width + columns - 1) / columns));
  piece_kernel<<<grid, kEmbeddingThreads, 0, stream>>>(p);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  border_kernel<<<grid, kEmbeddingThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

int64_t sort_bytes(int64_t tokens) {
  const int32_t* const in = nullptr;
  int32_t* const out = nullptr;
  size_t bytes = 0;
  TWELL_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(nullptr, bytes, in, out, in, out, tokens));
  return static_cast<int64_t>(bytes);
}

}  // namespace

cudaError_t launch_embedding(const EmbeddingCuda& p, cudaStream_t stream) {
  return launch_for_each(p.tokens * (p.width / kColumns), CopyPiece{p}, stream);
}

EmbeddingWorkspaceCuda::EmbeddingWorkspaceCuda(int64_t max_tokens, int64_t width)
    : max_tokens_(max_tokens),
      width_(width),
      numbers_(3 * max_tokens),
      borders_(border_values(max_tokens, width)),
      sort_memory_(sort_bytes(max_tokens)) {}

int64_t EmbeddingWorkspaceCuda::bytes_needed(int64_t max_tokens, int64_t width) {
  return 3 * max_tokens * static_cast<int64_t>(sizeof(int32_t)) +
         border_values(max_tokens, width) * static_cast<int64_t>(sizeof(float)) +
         sort_bytes(max_tokens);
}

void embedding_backward_cuda(CudaContext& ctx, const EmbeddingBackwardCuda& problem,
                             const EmbeddingWorkspaceCuda& workspace) {
  const int64_t tokens = problem.tokens;
  TWELL_CHECK(problem.width % 8 == 0, "embedding backward: width {} is no multiple of 8",
              problem.width);
  TWELL_CHECK(tokens <= workspace.max_tokens_ && problem.width == workspace.width_,
              "embedding backward: [{}, {}] in a workspace for [{}, {}]", tokens, problem.width,
              workspace.max_tokens_, workspace.width_);
  if (tokens == 0) return;
  int32_t* const iota = workspace.numbers_.data();
  int32_t* const sorted_ids = iota + workspace.max_tokens_;
  int32_t* const sorted_tokens = sorted_ids + workspace.max_tokens_;
  TWELL_CUDA_CHECK(launch_for_each(tokens, Iota{iota}, ctx.stream()));
  auto bytes = static_cast<size_t>(workspace.sort_memory_.bytes());
  TWELL_CUDA_CHECK(
      cub::DeviceRadixSort::SortPairs(workspace.sort_memory_.data(), bytes, problem.ids, sorted_ids,
                                      static_cast<const int32_t*>(iota), sorted_tokens, tokens, 0,
                                      bits_of(problem.vocab), ctx.stream()));
  TWELL_CUDA_CHECK(
      launch_embedding_sums({tokens, problem.width, sorted_ids, sorted_tokens, problem.d_out,
                             workspace.borders_.data(), problem.d_table, problem.scale},
                            ctx.stream()));
}

}  // namespace twell
