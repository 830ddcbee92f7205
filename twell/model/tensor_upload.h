// SPDX-License-Identifier: Apache-2.0
// Stored tensors (F32, F16, BF16; host memory) to bf16 matrices in device memory.
#pragma once

#include <cuda_bf16.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "twell/base/cuda.h"
#include "twell/base/dtype.h"

namespace twell {

// Copies tensors to the device in pieces of 32 MiB, two in flight: while the device converts one,
// the host copies the next into page-locked memory, from a mapped file for example. The destructor
// waits for the stream.
class TensorUploader {
 public:
  explicit TensorUploader(CudaContext& ctx);
  ~TensorUploader();
  TensorUploader(const TensorUploader&) = delete;
  TensorUploader& operator=(const TensorUploader&) = delete;

  // `bytes` holds [rows, cols] values of `type`, row-major. `to` becomes [rows, cols], or
  // [cols, rows] when transposed. `seen` is called with part after part of `bytes`, each just after
  // it was copied and while it is in the caches; it may throw. InputError on a row of more than
  // 32 MiB.
  void copy(std::span<const std::byte> bytes, DType type, int64_t rows, int64_t cols,
            bool transposed, __nv_bfloat16* to,
            const std::function<void(std::span<const std::byte> part)>& seen = {});

 private:
  struct Piece {
    PinnedBuffer<std::byte> host;
    DeviceBuffer<std::byte> device;
    CudaEvent used;  // recorded when the device has converted the piece
  };
  CudaContext& ctx_;
  std::array<Piece, 2> pieces_;
  size_t next_ = 0;
};

}  // namespace twell
