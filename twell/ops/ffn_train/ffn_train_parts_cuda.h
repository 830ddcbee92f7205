// SPDX-License-Identifier: Apache-2.0
// The objects behind ffn_train_cuda.h, and the two executions. Each object owns one block of device
// memory, which its execution lays out. Internal to ffn_train.
#pragma once

#include <cstddef>

#include "twell/base/carver.h"
#include "twell/ops/ffn_train/ffn_train_cuda.h"

namespace twell {

namespace ffn_train {

// What the hybrid execution has room to keep of one chunk of tokens.
struct HybridCapacity {
  int64_t pairs = 0;   // active (token, neuron) pairs
  int64_t blocks = 0;  // of 64 neurons of tiles' unions
};

}  // namespace ffn_train

struct FfnSavedCuda::Parts {
  FfnTrainShapeCuda shape;
  FfnTrainExecution execution = FfnTrainExecution::kDense;
  ffn_train::HybridCapacity capacity;
  int64_t tokens = 0;  // of the forward whose activations are saved, or 0
  TwellPacked replay;  // of that forward
  DeviceBuffer<std::byte> memory;
};

struct FfnTrainWorkspaceCuda::Parts {
  FfnTrainShapeCuda shape;
  bool hybrid = false;  // has room for the hybrid execution
  int64_t bytes = 0;
  std::byte* memory = nullptr;  // of `owned`, or the caller's
  DeviceBuffer<std::byte> owned;
};

namespace ffn_train {

// Arrays of a block of device memory, aligned as cudaMalloc aligns.
inline Carver device_carver(std::byte* block = nullptr) { return {block, 256}; }

// Sizes in bytes.
int64_t dense_saved_bytes(const FfnTrainShapeCuda& shape);
int64_t dense_workspace_bytes(const FfnTrainShapeCuda& shape);
int64_t hybrid_saved_bytes(const FfnTrainShapeCuda& shape, HybridCapacity capacity);
int64_t hybrid_workspace_bytes(const FfnTrainShapeCuda& shape);

// What to make room for: what nnz per token and union_neurons per tile of tokens (negative: not
// known) let expect, as far as the size of the dense execution's memory allows.
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
