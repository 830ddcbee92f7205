// SPDX-License-Identifier: Apache-2.0
// Entry points: memory, checks, and the calls of the prepared execution.
#include "twell/ops/ffn_train/ffn_train_cuda.h"

#include <algorithm>

#include "twell/ops/ffn_train/ffn_train_parts_cuda.h"

namespace twell {
namespace {

void check_shape(const FfnTrainShapeCuda& shape) {
  TWELL_CHECK(shape.max_tokens > 0 && shape.width > 0 && shape.ffn > 0,
              "FFN in training: {} tokens, width {}, {} neurons", shape.max_tokens, shape.width,
              shape.ffn);
  TWELL_CHECK(shape.width % 8 == 0 && shape.ffn % 8 == 0,
              "width {} and FFN size {} must be multiples of 8", shape.width, shape.ffn);
}

void check_call(const FfnTrainShapeCuda& saved, const FfnTrainShapeCuda& workspace, int64_t tokens,
                const FfnTrainWeightsCuda& weights) {
  TWELL_CHECK(saved.width == workspace.width && saved.ffn == workspace.ffn &&
                  saved.gated == workspace.gated,
              "FFN of width {} and {} neurons in a workspace for {} and {}", saved.width, saved.ffn,
              workspace.width, workspace.ffn);
  TWELL_CHECK(tokens > 0 && tokens <= saved.max_tokens && tokens <= workspace.max_tokens,
              "{} tokens, at most {} were planned for", tokens,
              std::min(saved.max_tokens, workspace.max_tokens));
  TWELL_CHECK((weights.w_gate != nullptr) == saved.gated, "weights {} gate for a layer that has {}",
              weights.w_gate != nullptr ? "with a" : "without a", saved.gated ? "one" : "none");
}

}  // namespace

FfnSavedCuda::FfnSavedCuda(CudaContext& ctx, const FfnTrainShapeCuda& shape)
    : parts_(std::make_unique<Parts>()) {
  check_shape(shape);
  parts_->shape = shape;
  prepare(ctx, FfnTrainExecution::kDense, -1.0);
}
FfnSavedCuda::~FfnSavedCuda() = default;
FfnSavedCuda::FfnSavedCuda(FfnSavedCuda&&) noexcept = default;
FfnSavedCuda& FfnSavedCuda::operator=(FfnSavedCuda&&) noexcept = default;

void FfnSavedCuda::prepare(CudaContext& ctx, FfnTrainExecution execution, double nnz,
                           double union_neurons) {
  const bool hybrid = execution == FfnTrainExecution::kHybrid;
  if (hybrid) {
    const std::string unsupported = ffn_train_hybrid_unsupported(ctx, parts_->shape);
    TWELL_CHECK(unsupported.empty(), "hybrid FFN in training: {}", unsupported);
  }
  parts_->execution = execution;
  parts_->capacity = {};
  if (hybrid) parts_->capacity = ffn_train::hybrid_capacity(parts_->shape, nnz, union_neurons);
  parts_->tokens = 0;
  const int64_t bytes = bytes_needed(parts_->shape, execution, nnz, union_neurons);
  if (parts_->memory.bytes() == bytes) return;
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
  parts_->memory = {};  // freed first, so that both are never held at once
  parts_->memory = DeviceBuffer<std::byte>(bytes);
}

FfnTrainExecution FfnSavedCuda::execution() const { return parts_->execution; }

int64_t FfnSavedCuda::bytes() const { return parts_->memory.bytes(); }

int64_t FfnSavedCuda::bytes_needed(const FfnTrainShapeCuda& shape, FfnTrainExecution execution,
                                   double nnz, double union_neurons) {
  if (execution == FfnTrainExecution::kDense) return ffn_train::dense_saved_bytes(shape);
  return ffn_train::hybrid_saved_bytes(shape,
                                       ffn_train::hybrid_capacity(shape, nnz, union_neurons));
}

FfnTrainWorkspaceCuda::FfnTrainWorkspaceCuda(CudaContext& ctx, const FfnTrainShapeCuda& shape,
                                             bool hybrid, std::byte* memory)
    : parts_(std::make_unique<Parts>()) {
  check_shape(shape);
  parts_->shape = shape;
  parts_->hybrid = hybrid && ffn_train_hybrid_unsupported(ctx, shape).empty();
  parts_->bytes = bytes_needed(ctx, shape, hybrid);
  if (memory == nullptr) parts_->owned = DeviceBuffer<std::byte>(parts_->bytes);
  parts_->memory = memory == nullptr ? parts_->owned.data() : memory;
  // The dense execution's ticket lies here, and is 0 between calls.
  TWELL_CUDA_CHECK(cudaMemsetAsync(parts_->memory, 0, kOwnBytes, ctx.stream()));
}
FfnTrainWorkspaceCuda::FfnTrainWorkspaceCuda(CudaContext& ctx, const FfnTrainShapeCuda& shape)
    : FfnTrainWorkspaceCuda(ctx, shape, /*hybrid=*/true, /*memory=*/nullptr) {}
FfnTrainWorkspaceCuda::~FfnTrainWorkspaceCuda() = default;
FfnTrainWorkspaceCuda::FfnTrainWorkspaceCuda(FfnTrainWorkspaceCuda&&) noexcept = default;
FfnTrainWorkspaceCuda& FfnTrainWorkspaceCuda::operator=(FfnTrainWorkspaceCuda&&) noexcept = default;

int64_t FfnTrainWorkspaceCuda::bytes() const { return parts_->bytes; }

int64_t FfnTrainWorkspaceCuda::bytes_needed(const CudaContext& ctx, const FfnTrainShapeCuda& shape,
                                            bool hybrid) {
  const int64_t dense = ffn_train::dense_workspace_bytes(shape);
  if (!hybrid || !ffn_train_hybrid_unsupported(ctx, shape).empty()) return dense;
  return std::max(dense, ffn_train::hybrid_workspace_bytes(shape));
}

void ffn_train_forward_cuda(CudaContext& ctx, const FfnTrainForwardCuda& problem,
                            FfnSavedCuda& saved, FfnTrainWorkspaceCuda& workspace) {
  check_call(saved.parts().shape, workspace.parts().shape, problem.tokens, problem.weights);
  if (saved.execution() == FfnTrainExecution::kDense) {
    ffn_train::dense_forward_cuda(ctx, problem, saved.parts(), workspace.parts());
  } else {
    TWELL_CHECK(workspace.parts().hybrid, "a hybrid call in a workspace for dense ones");
    ffn_train::hybrid_forward_cuda(ctx, problem, saved.parts(), workspace.parts());
  }
  saved.parts().tokens = problem.tokens;
}

void ffn_train_backward_cuda(CudaContext& ctx, const FfnTrainBackwardCuda& problem,
                             FfnSavedCuda& saved, FfnTrainWorkspaceCuda& workspace) {
  check_call(saved.parts().shape, workspace.parts().shape, problem.tokens, problem.weights);
  TWELL_CHECK(problem.tokens == saved.parts().tokens,
              "backward of {} tokens, but activations of {} are saved", problem.tokens,
              saved.parts().tokens);
  if (saved.execution() == FfnTrainExecution::kDense) {
    ffn_train::dense_backward_cuda(ctx, problem, saved.parts(), workspace.parts());
  } else {
    ffn_train::hybrid_backward_cuda(ctx, problem, saved.parts(), workspace.parts());
  }
  saved.parts().tokens = 0;
}

GpuFfnLayer gpu_ffn_layer(const CudaContext& ctx, const FfnTrainShapeCuda& shape) {
  return {.width = shape.width,
          .ffn = shape.ffn,
          .gated = shape.gated,
          .device = {.compute_capability = ctx.compute_capability()}};
}

std::string ffn_train_hybrid_unsupported(const CudaContext& ctx, const FfnTrainShapeCuda& shape) {
  return gpu_ffn_train_unsupported(FfnTrainExecution::kHybrid, gpu_ffn_layer(ctx, shape));
}

}  // namespace twell
