// SPDX-License-Identifier: Apache-2.0
#include "twell/model/tensor_upload.h"

#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "twell/base/for_each.cuh"

namespace twell {
namespace {

constexpr int kUploadThreads = 256;
constexpr int kUploadTile = 32;  // rows and columns of the tiles transposed in shared memory

__device__ __nv_bfloat16 rounded(float value) { return __float2bfloat16(value); }
__device__ __nv_bfloat16 rounded(__half value) { return __float2bfloat16(__half2float(value)); }
__device__ __nv_bfloat16 rounded(__nv_bfloat16 value) { return value; }

template <typename T>
struct Convert {
  const T* from;
  __nv_bfloat16* to;
  __device__ void operator()(int64_t i) const { to[i] = rounded(from[i]); }
};

template <typename T>
__global__ void convert_transposed_kernel(const T* from, int64_t rows, int64_t cols,
                                          __nv_bfloat16* to, int64_t to_stride) {
  __shared__ __nv_bfloat16 tile[kUploadTile][kUploadTile + 2];  // padded against bank conflicts
  const int64_t row0 = int64_t{blockIdx.y} * kUploadTile, col0 = int64_t{blockIdx.x} * kUploadTile;
  for (int r = static_cast<int>(threadIdx.y); r < kUploadTile; r += static_cast<int>(blockDim.y)) {
    if (row0 + r < rows && col0 + threadIdx.x < cols) {
      tile[r][threadIdx.x] = rounded(from[(row0 + r) * cols + col0 + threadIdx.x]);
    }
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.y); c < kUploadTile; c += static_cast<int>(blockDim.y)) {
    if (col0 + c < cols && row0 + threadIdx.x < rows) {
      to[(col0 + c) * to_stride + row0 + threadIdx.x] = tile[threadIdx.x][c];
    }
  }
}

// Calls use(pointer of the stored type).
template <typename Use>
cudaError_t with_type(const void* from, DType type, const Use& use) {
  switch (type) {
    case DType::kF32:
      return use(static_cast<const float*>(from));
    case DType::kF16:
      return use(static_cast<const __half*>(from));
    case DType::kBF16:
      return use(static_cast<const __nv_bfloat16*>(from));
    case DType::kI8:  // never in bf16 on a GPU
      break;
  }
  return cudaErrorInvalidValue;
}

// to[i] = from[i], i < n.
cudaError_t launch_convert(const void* from, DType type, int64_t n, __nv_bfloat16* to,
                           cudaStream_t stream) {
  return with_type(from, type, [&](auto* values) {
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(values)>>;
    return launch_for_each(n, Convert<T>{values, to}, stream);
  });
}

// to[c * to_stride + r] = from[r * cols + c].
cudaError_t launch_convert_transposed(const void* from, DType type, int64_t rows, int64_t cols,
                                      __nv_bfloat16* to, int64_t to_stride, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((cols + kUploadTile - 1) / kUploadTile),
                  static_cast<unsigned>((rows + kUploadTile - 1) / kUploadTile));
  return with_type(from, type, [&](auto* values) {
    convert_transposed_kernel<<<grid, dim3(kUploadTile, kUploadThreads / kUploadTile), 0, stream>>>(
        values, rows, cols, to, to_stride);
    return cudaGetLastError();
  });
}

constexpr int64_t kPieceBytes = int64_t{32} << 20;
// Bytes copied between calls of `seen`; source and copy stay in the L2.
constexpr size_t kPartBytes = size_t{256} << 10;

}  // namespace

TensorUploader::TensorUploader(CudaContext& ctx) : ctx_(ctx) {
  for (Piece& piece : pieces_) {
    piece.host = PinnedBuffer<std::byte>(kPieceBytes);
    piece.device = DeviceBuffer<std::byte>(kPieceBytes);
  }
}

TensorUploader::~TensorUploader() { cudaStreamSynchronize(ctx_.stream()); }

void TensorUploader::copy(std::span<const std::byte> bytes, DType type, int64_t rows, int64_t cols,
                          bool transposed, __nv_bfloat16* to,
                          const std::function<void(std::span<const std::byte>)>& seen) {
  const int64_t row_bytes = cols * (static_cast<int64_t>(dtype_size(type)));
  TWELL_REQUIRE(row_bytes <= kPieceBytes, "a tensor row of {} values is too long", cols);
  const int64_t step = kPieceBytes / row_bytes;
  for (int64_t row = 0; row < rows; row += step) {
    const int64_t count = std::min(step, rows - row);
    const auto size = static_cast<size_t>(count * row_bytes);
    Piece& piece = pieces_[next_++ % pieces_.size()];
    piece.used.synchronize();
    const auto from = bytes.subspan(static_cast<size_t>(row * row_bytes), size);
    for (size_t begin = 0; begin < size; begin += kPartBytes) {
      const auto part = from.subspan(begin, std::min(kPartBytes, size - begin));
      std::memcpy(piece.host.data() + begin, part.data(), part.size());
      if (seen) seen(part);
    }
    TWELL_CUDA_CHECK(cudaMemcpyAsync(piece.device.data(), piece.host.data(), size,
                                     cudaMemcpyHostToDevice, ctx_.stream()));
    TWELL_CUDA_CHECK(transposed ? launch_convert_transposed(piece.device.data(), type, count, cols,
                                                            to + row, rows, ctx_.stream())
                                : launch_convert(piece.device.data(), type, count * cols,
                                                 to + row * cols, ctx_.stream()));
    piece.used.record(ctx_.stream());
  }
}

}  // namespace twell
