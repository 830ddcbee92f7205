// SPDX-License-Identifier: Apache-2.0
#include "twell/model/tensor_upload_kernels.h"

#include <cuda_fp16.h>

#include <type_traits>

#include "twell/base/for_each.cuh"

namespace twell {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 32;  // rows and columns of the tiles transposed in shared memory

__device__ __nv_bfloat16 to_bf16(float value) { return __float2bfloat16(value); }
__device__ __nv_bfloat16 to_bf16(__half value) { return __float2bfloat16(__half2float(value)); }
__device__ __nv_bfloat16 to_bf16(__nv_bfloat16 value) { return value; }

template <typename T>
struct Convert {
  const T* from;
  __nv_bfloat16* to;
  __device__ void operator()(int64_t i) const { to[i] = to_bf16(from[i]); }
};

template <typename T>
__global__ void convert_transposed_kernel(const T* from, int64_t rows, int64_t cols,
                                          __nv_bfloat16* to, int64_t to_stride) {
  __shared__ __nv_bfloat16 tile[kTile][kTile + 2];  // padded against bank conflicts
  const int64_t row0 = int64_t{blockIdx.y} * kTile, col0 = int64_t{blockIdx.x} * kTile;
  for (int r = static_cast<int>(threadIdx.y); r < kTile; r += static_cast<int>(blockDim.y)) {
    if (row0 + r < rows && col0 + threadIdx.x < cols) {
      tile[r][threadIdx.x] = to_bf16(from[(row0 + r) * cols + col0 + threadIdx.x]);
    }
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.y); c < kTile; c += static_cast<int>(blockDim.y)) {
    if (col0 + c < cols && row0 + threadIdx.x < rows) {
      to[(col0 + c) * to_stride + row0 + threadIdx.x] = tile[threadIdx.x][c];
    }
  }
}

// Calls use(pointer of the stored type).
template <typename Use>
cudaError_t with_type(const void* from, StoredFloat type, const Use& use) {
  switch (type) {
    case StoredFloat::kF32:
      return use(static_cast<const float*>(from));
    case StoredFloat::kF16:
      return use(static_cast<const __half*>(from));
    case StoredFloat::kBF16:
      return use(static_cast<const __nv_bfloat16*>(from));
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_convert(const void* from, StoredFloat type, int64_t n, __nv_bfloat16* to,
                           cudaStream_t stream) {
  return with_type(from, type, [&](auto* values) {
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(values)>>;
    return launch_for_each(n, Convert<T>{values, to}, stream);
  });
}

cudaError_t launch_convert_transposed(const void* from, StoredFloat type, int64_t rows,
                                      int64_t cols, __nv_bfloat16* to, int64_t to_stride,
                                      cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((cols + kTile - 1) / kTile),
                  static_cast<unsigned>((rows + kTile - 1) / kTile));
  return with_type(from, type, [&](auto* values) {
    convert_transposed_kernel<<<grid, dim3(kTile, kThreads / kTile), 0, stream>>>(
        values, rows, cols, to, to_stride);
    return cudaGetLastError();
  });
}

}  // namespace twell
