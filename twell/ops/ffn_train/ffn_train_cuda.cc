// SPDX-License-Identifier: Apache-2.0
// Entry points: memory, checks, and the choice of the execution.
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

void FfnSavedCuda::prepare(CudaContext& ctx, FfnTrainExecution execution, double /*nnz*/) {
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
  const int64_t size = parts_->shape.max_tokens * parts_->shape.ffn;
  parts_->execution = execution;
  parts_->tokens = 0;
  if (parts_->gate.size() == size) return;
  parts_->gate = DeviceBuffer<__nv_bfloat16>(size);
  parts_->up = DeviceBuffer<__nv_bfloat16>(parts_->shape.gated ? size : 0);
}

FfnTrainExecution FfnSavedCuda::execution() const { return parts_->execution; }

int64_t FfnSavedCuda::bytes() const { return parts_->gate.bytes() + parts_->up.bytes(); }

int64_t FfnSavedCuda::bytes_needed(const FfnTrainShapeCuda& shape, FfnTrainExecution /*execution*/,
                                   double /*nnz*/) {
  return shape.max_tokens * shape.ffn * (shape.gated ? 2 : 1) * int64_t{sizeof(__nv_bfloat16)};
}

FfnTrainWorkspaceCuda::FfnTrainWorkspaceCuda(CudaContext& ctx, const FfnTrainShapeCuda& shape)
    : parts_(std::make_unique<Parts>()) {
  check_shape(shape);
  parts_->shape = shape;
  parts_->hidden = DeviceBuffer<__nv_bfloat16>(shape.max_tokens * shape.ffn);
  parts_->sum_parts = DeviceBuffer<double>(ffn_train::hidden_ctas(shape.max_tokens));
  parts_->ticket = DeviceBuffer<uint32_t>(1);
  TWELL_CUDA_CHECK(cudaMemsetAsync(parts_->ticket.data(), 0, sizeof(uint32_t), ctx.stream()));
}
FfnTrainWorkspaceCuda::~FfnTrainWorkspaceCuda() = default;

int64_t FfnTrainWorkspaceCuda::bytes() const {
  return parts_->hidden.bytes() + parts_->sum_parts.bytes() + parts_->ticket.bytes();
}

int64_t FfnTrainWorkspaceCuda::bytes_needed(const CudaContext& /*ctx*/,
                                            const FfnTrainShapeCuda& shape) {
  return shape.max_tokens * shape.ffn * int64_t{sizeof(__nv_bfloat16)} +
         ffn_train::hidden_ctas(shape.max_tokens) * int64_t{sizeof(double)} +
         int64_t{sizeof(uint32_t)};
}

void ffn_train_forward_cuda(CudaContext& ctx, const FfnTrainForwardCuda& problem,
                            FfnSavedCuda& saved, FfnTrainWorkspaceCuda& workspace) {
  check_call(saved.parts().shape, workspace.parts().shape, problem.tokens, problem.weights);
  ffn_train::dense_forward_cuda(ctx, problem, saved.parts(), workspace.parts());
  saved.parts().tokens = problem.tokens;
}

void ffn_train_backward_cuda(CudaContext& ctx, const FfnTrainBackwardCuda& problem,
                             FfnSavedCuda& saved, FfnTrainWorkspaceCuda& workspace) {
  check_call(saved.parts().shape, workspace.parts().shape, problem.tokens, problem.weights);
  TWELL_CHECK(problem.tokens == saved.parts().tokens,
              "backward of {} tokens, but activations of {} are saved", problem.tokens,
              saved.parts().tokens);
  ffn_train::dense_backward_cuda(ctx, problem, saved.parts(), workspace.parts());
  saved.parts().tokens = 0;
}

FfnTrainExecution choose_ffn_train_cuda(const FfnTrainShapeCuda& /*shape*/, int64_t /*tokens*/,
                                        double /*nnz*/) {
  return FfnTrainExecution::kDense;
}

}  // namespace twell
