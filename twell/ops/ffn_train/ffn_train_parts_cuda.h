// SPDX-License-Identifier: Apache-2.0
// The memory behind ffn_train_cuda.h and the executions that use it. Each object owns one block of
// device memory, which its execution lays out.
#pragma once

#include <cstddef>

#include "twell/ops/ffn_train/ffn_train_cuda.h"

namespace twell {

namespace ffn_train {

// What the hybrid execution has room to keep of one chunk.
struct HybridCapacity {
  int64_t pairs = 0;   // active ones
  int64_t blocks = 0;  // of 64 neurons of a tile's union
};

}  // namespace ffn_train

struct FfnSavedCuda::Parts {
  FfnTrainShapeCuda shape;
  FfnTrainExecution execution = FfnTrainExecution::kDense;
  ffn_train::HybridCapacity capacity;
  int64_t tokens = 0;  // of the forward whose activations these are, or 0
  TwellPacked replay;  // of that forward
  DeviceBuffer<std::byte> memory;
};

struct FfnTrainWorkspaceCuda::Parts {
  FfnTrainShapeCuda shape;
  bool hybrid = false;  // has room for the hybrid execution
  int64_t bytes = 0;
  std::byte* memory = nullptr;
  DeviceBuffer<std::byte> owned;  // or the caller's
};

namespace ffn_train {

// Hands out a block of memory piece by piece, in multiples of 256 bytes; without a block it only
// counts.
class Layout {
 public:
  explicit Layout(std::byte* base = nullptr) : base_(base) {}
  template <typename T>
  T* take(int64_t size) {
    T* piece = base_ != nullptr ? reinterpret_cast<T*>(base_ + bytes_) : nullptr;
    bytes_ += (size * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return piece;
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  int64_t bytes_ = 0;
};

// Sizes in bytes.
int64_t dense_saved_bytes(const FfnTrainShapeCuda& shape);
int64_t dense_workspace_bytes(const FfnTrainShapeCuda& shape);
int64_t hybrid_saved_bytes(const FfnTrainShapeCuda& shape, HybridCapacity capacity);
int64_t hybrid_workspace_bytes(const FfnTrainShapeCuda& shape);

// What to make room for: as much as nnz per token and union_neurons in a tile of tokens (negative:
// not known) make likely and as the dense execution's memory allows.
HybridCapacity hybrid_capacity(const FfnTrainShapeCuda& shape, double nnz, double union_neurons);

void dense_forward_cuda(CudaContext& ctx, const FfnTrainForwardCuda& problem,
                        FfnSavedCuda::Parts& saved, FfnTrainWorkspaceCuda::Parts& workspace);
void dense_backward_cuda(CudaContext& ctx, const FfnTrainBackwardCuda& problem,
                         FfnSavedCuda::Parts& saved, FfnTrainWorkspaceCuda::Parts& workspace);
void hybrid_forward_cuda(CudaContext& ctx, const FfnTrainForwardCuda& problem,
                         FfnSavedCuda::Parts& saved, FfnTrainWorkspaceCuda::Parts& workspace);
void hybrid_backward_cuda(CudaContext& ctx, const FfnTrainBackwardCuda& problem,
                          FfnSavedCuda::Parts& saved, FfnTrainWorkspaceCuda::Parts& workspace);

}  // namespace ffn_train
}  // namespace twell
