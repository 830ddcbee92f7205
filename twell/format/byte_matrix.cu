// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "twell/base/dependent_launch.cuh"
#include "twell/base/reduce.cuh"
#include "twell/format/byte_matrix_cuda.h"
#include "twell/format/byte_rows.cuh"

namespace twell {
namespace {

constexpr int kByteThreads = 256;
constexpr int kBytePiece = 16;  // values that a thread takes at a time: 16 bytes of 8-bit values

__device__ __forceinline__ void load_piece(const __nv_bfloat16* from, float (&to)[kBytePiece]) {
#pragma unroll
  for (int i = 0; i < kBytePiece / 8; ++i) {
    const uint4 bits = reinterpret_cast<const uint4*>(from)[i];
    const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      to[8 * i + 2 * k] = __uint_as_float(pairs[k] << 16);
      to[8 * i + 2 * k + 1] = __uint_as_float(pairs[k] & 0xffff0000u);
    }
  }
}

// kRowThreads, a warp or the whole CTA, share a row. It is read twice, the second time out of the
// caches.
template <ByteType kType, int kRowThreads>
__global__ void __launch_bounds__(kByteThreads) quantise_rows_kernel(QuantiseRowsCuda p) {
  // Under programmatic dependent launch: the next kernel may begin to read its weights.
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
  const int64_t row = int64_t{blockIdx.x} * (kByteThreads / kRowThreads) +
                      static_cast<int>(threadIdx.x) / kRowThreads;
  if (row >= p.rows) return;  // whole warps only; never taken if the CTA shares a row
  const int pieces = static_cast<int>(p.cols / kBytePiece);
  const int first = static_cast<int>(threadIdx.x) % kRowThreads;
  const __nv_bfloat16* x = p.x + row * p.cols;
  float largest = kLeastLargest;
  float piece[kBytePiece];
  for (int i = first; i < pieces; i += kRowThreads) {
    load_piece(x + i * kBytePiece, piece);
#pragma unroll
    for (int k = 0; k < kBytePiece; ++k) largest = fmaxf(largest, fabsf(piece[k]));
  }
  largest = warp_max(largest);
  if constexpr (kRowThreads != 32) {
    __shared__ float of_warp[kByteThreads / 32];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
    __syncthreads();
    largest = warp_max(of_warp[threadIdx.x % (kByteThreads / 32)]);
  }
  const float inverse = most_of(kType) / largest;
  for (int i = first; i < pieces; i += kRowThreads) {
    load_piece(x + i * kBytePiece, piece);
    uint32_t bytes[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      bytes[k] = byte_rows::quantise4<kType>(piece[4 * k], piece[4 * k + 1], piece[4 * k + 2],
                                             piece[4 * k + 3], inverse);
    }
    reinterpret_cast<uint4*>(p.values + row * p.cols)[i] = {bytes[0], bytes[1], bytes[2], bytes[3]};
  }
  if (first == 0) p.scales[row] = largest / most_of(kType);
}

// With programmatic dependent launch where the kernel that the device runs waits.
cudaError_t launch_dependent(void (*kernel)(QuantiseRowsCuda), unsigned blocks,
                             const QuantiseRowsCuda& p, cudaStream_t stream) {
  bool dependent = false;
  const cudaError_t status = ask_dependent_launch(dependent);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kByteThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, p);
}

template <ByteType kType>
cudaError_t quantise(const QuantiseRowsCuda& p, cudaStream_t stream) {
  // A warp a row where there are enough rows to fill the GPU.
  constexpr int64_t kManyRows = 1024;
  if (p.rows >= kManyRows && p.cols <= 4096) {
    const auto blocks =
        static_cast<unsigned>((p.rows + kByteThreads / 32 - 1) / (kByteThreads / 32));
    return launch_dependent(quantise_rows_kernel<kType, 32>, blocks, p, stream);
  }
  return launch_dependent(quantise_rows_kernel<kType, kByteThreads>, static_cast<unsigned>(p.rows),
                          p, stream);
}

template <ByteType kType>
__device__ __forceinline__ float widened(uint8_t bits) {
  if constexpr (kType == ByteType::kE4M3) {
    const uint32_t pair = byte_rows::e4m3x2_to_bf16x2(bits);
    return __uint_as_float(pair << 16);
  } else {
    return static_cast<float>(static_cast<int8_t>(bits));
  }
}

// A thread widens 16 values.
template <ByteType kType>
__global__ void __launch_bounds__(kByteThreads) widen_rows_kernel(WidenRowsCuda p, int64_t pieces) {
  const int64_t i = int64_t{blockIdx.x} * kByteThreads + threadIdx.x;
  if (i >= pieces) return;
  const float scale = p.x.scales == nullptr ? 1.0f : p.x.scales[i * kBytePiece / p.cols];
  const uint4 bytes = reinterpret_cast<const uint4*>(p.x.values)[i];
  const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
  uint4 out[2];
  auto* pairs = reinterpret_cast<__nv_bfloat162*>(out);
#pragma unroll
  for (int k = 0; k < kBytePiece / 2; ++k) {
    const uint32_t two = words[k / 2] >> (k % 2 * 16);
    pairs[k] = __floats2bfloat162_rn(widened<kType>(static_cast<uint8_t>(two)) * scale,
                                     widened<kType>(static_cast<uint8_t>(two >> 8)) * scale);
  }
  reinterpret_cast<uint4*>(p.out)[2 * i] = out[0];
  reinterpret_cast<uint4*>(p.out)[2 * i + 1] = out[1];
}

constexpr int kByteTile = 64;

// Tiles of 64 x 64 through shared memory.
template <ByteType kType>
__global__ void __launch_bounds__(kByteThreads) widen_transposed_kernel(WidenRowsCuda p) {
  __shared__ __nv_bfloat16 tile[kByteTile][kByteTile + 2];  // padded against bank conflicts
  const int64_t row0 = int64_t{blockIdx.y} * kByteTile, col0 = int64_t{blockIdx.x} * kByteTile;
  {
    const int r = static_cast<int>(threadIdx.x) / 4,
              c = static_cast<int>(threadIdx.x) % 4 * kBytePiece;
    if (row0 + r < p.rows && col0 + c < p.cols) {
      const float scale = p.x.scales == nullptr ? 1.0f : p.x.scales[row0 + r];
      const uint4 bytes =
          *reinterpret_cast<const uint4*>(p.x.values + (row0 + r) * p.cols + col0 + c);
      const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
      for (int k = 0; k < kBytePiece; ++k) {
        tile[c + k][r] = __float2bfloat16(
            widened<kType>(static_cast<uint8_t>(words[k / 4] >> (k % 4 * 8))) * scale);
      }
    }
  }
  __syncthreads();
  // Eight threads a row of the transpose, 8 values each.
  for (int i = static_cast<int>(threadIdx.x); i < kByteTile * 8; i += kByteThreads) {
    const int c = i / 8, r = i % 8 * 8;
    if (col0 + c >= p.cols || row0 + r >= p.rows) continue;
    uint4 out;
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(&out);
#pragma unroll
    for (int k = 0; k < 4; ++k) pairs[k] = {tile[c][r + 2 * k], tile[c][r + 2 * k + 1]};
    *reinterpret_cast<uint4*>(p.out + (col0 + c) * p.rows + row0 + r) = out;
  }
}

constexpr int kEdge = 32;

template <typename T>
__global__ void __launch_bounds__(kByteThreads)
    transpose_kernel(const T* x, int64_t rows, int64_t cols, T* out) {
  __shared__ T tile[kEdge][kEdge + 4 / sizeof(T)];
  const int64_t row0 = int64_t{blockIdx.y} * kEdge, col0 = int64_t{blockIdx.x} * kEdge;
  const int lane = static_cast<int>(threadIdx.x) % kEdge;
  for (int i = static_cast<int>(threadIdx.x) / kEdge; i < kEdge; i += kByteThreads / kEdge) {
    if (row0 + i < rows && col0 + lane < cols) tile[i][lane] = x[(row0 + i) * cols + col0 + lane];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x) / kEdge; i < kEdge; i += kByteThreads / kEdge) {
    if (col0 + i < cols && row0 + lane < rows) out[(col0 + i) * rows + row0 + lane] = tile[lane][i];
  }
}

template <typename T>
cudaError_t transpose(const T* x, int64_t rows, int64_t cols, T* out, cudaStream_t stream) {
  if (rows == 0 || cols == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>((cols + kEdge - 1) / kEdge),
                  static_cast<unsigned>((rows + kEdge - 1) / kEdge));
  transpose_kernel<<<grid, kByteThreads, 0, stream>>>(x, rows, cols, out);
  return cudaGetLastError();
}

template <ByteType kType>
cudaError_t widen(const WidenRowsCuda& p, cudaStream_t stream) {
  if (p.transposed) {
    if (p.rows % kBytePiece != 0) return cudaErrorInvalidValue;
    const dim3 grid(static_cast<unsigned>((p.cols + kByteTile - 1) / kByteTile),
                    static_cast<unsigned>((p.rows + kByteTile - 1) / kByteTile));
    widen_transposed_kernel<kType><<<grid, kByteThreads, 0, stream>>>(p);
  } else {
    const int64_t pieces = p.rows * p.cols / kBytePiece;
    widen_rows_kernel<kType><<<static_cast<unsigned>((pieces + kByteThreads - 1) / kByteThreads),
                               kByteThreads, 0, stream>>>(p, pieces);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_quantise_rows(const QuantiseRowsCuda& problem, cudaStream_t stream) {
  if (problem.cols <= 0 || problem.cols % kBytePiece != 0) return cudaErrorInvalidValue;
  if (problem.rows == 0) return cudaSuccess;
  return problem.type == ByteType::kE4M3 ? quantise<ByteType::kE4M3>(problem, stream)
                                         : quantise<ByteType::kInt8>(problem, stream);
}

cudaError_t launch_transpose(const __nv_bfloat16* x, int64_t rows, int64_t cols, __nv_bfloat16* out,
                             cudaStream_t stream) {
  return transpose(x, rows, cols, out, stream);
}

cudaError_t launch_transpose_bytes(const uint8_t* x, int64_t rows, int64_t cols, uint8_t* out,
                                   cudaStream_t stream) {
  return transpose(x, rows, cols, out, stream);
}

cudaError_t launch_widen_rows(const WidenRowsCuda& problem, cudaStream_t stream) {
  if (problem.cols <= 0 || problem.cols % kBytePiece != 0) return cudaErrorInvalidValue;
  if (problem.rows == 0) return cudaSuccess;
  return problem.type == ByteType::kE4M3 ? widen<ByteType::kE4M3>(problem, stream)
                                         : widen<ByteType::kInt8>(problem, stream);
}

}  // namespace twell
