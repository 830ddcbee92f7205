// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "twell/model/tensor_upload.h"

namespace twell {
namespace {

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

void TensorUploader::copy(std::span<const std::byte> bytes, StoredFloat type, int64_t rows,
                          int64_t cols, bool transposed, __nv_bfloat16* to,
                          const std::function<void(std::span<const std::byte>)>& seen) {
  const int64_t row_bytes = cols * (type == StoredFloat::kF32 ? 4 : 2);
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
