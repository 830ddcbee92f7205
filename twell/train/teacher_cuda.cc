// SPDX-License-Identifier: Apache-2.0
#include "twell/train/teacher_cuda.h"

#include <algorithm>
#include <vector>

namespace twell {
namespace {

// Documents of a call: the forward's workspace grows with them.
constexpr int64_t kDocuments = 256;

// Dense, so that it repeats bit for bit whatever ran before.
ForwardPlanCuda plan_of(MicroBatchShape shape) {
  return {.max_tokens = shape.tokens(),
          .max_sequences = std::max(shape.sequences, std::min(kDocuments, shape.tokens())),
          .max_length = shape.length,
          .ffn = FfnPolicy::kDense};
}

int64_t hidden_values(const ModelConfig& config, MicroBatchShape shape) {
  return shape.tokens() * config.width;
}

}  // namespace

TeacherForwardCuda::TeacherForwardCuda(CudaContext& ctx, const Model& teacher,
                                       MicroBatchShape shape)
    : ctx_(ctx),
      shape_(shape),
      model_(ctx, teacher),
      forward_(ctx, model_, plan_of(shape)),
      hidden_(hidden_values(teacher.config, shape)) {}

int64_t TeacherForwardCuda::bytes_needed(const CudaContext& ctx, const ModelConfig& teacher,
                                         MicroBatchShape shape) {
  constexpr auto kValue = static_cast<int64_t>(sizeof(__nv_bfloat16));
  return kValue * (teacher.parameter_count() + hidden_values(teacher, shape)) +
         ForwardCuda::bytes_needed(ctx, teacher, plan_of(shape));
}

void TeacherForwardCuda::run(std::span<const int32_t> inputs, std::span<const int64_t> documents) {
  std::vector<ForwardSequence> sequences(static_cast<size_t>(shape_.sequences),
                                         {.tokens = shape_.length});
  if (!documents.empty()) {
    sequences.clear();
    for (const int64_t length : documents) sequences.push_back({.tokens = length});
  }
  const int64_t width = model_.config().width;
  const auto most = static_cast<size_t>(plan_of(shape_).max_sequences);
  int64_t token = 0;
  for (size_t first = 0; first < sequences.size(); first += most) {
    const std::span<const ForwardSequence> group =
        std::span(sequences).subspan(first, std::min(most, sequences.size() - first));
    int64_t tokens = 0;
    for (const ForwardSequence& sequence : group) tokens += sequence.tokens;
    forward_.run(inputs.subspan(static_cast<size_t>(token), static_cast<size_t>(tokens)), group,
                 /*cache=*/nullptr);
    TWELL_CUDA_CHECK(cudaMemcpyAsync(hidden_.data() + token * width, forward_.hidden(),
                                     static_cast<size_t>(tokens * width) * sizeof(__nv_bfloat16),
                                     cudaMemcpyDeviceToDevice, ctx_.stream()));
    token += tokens;
  }
}

TeacherCuda TeacherForwardCuda::of_share(double share) const {
  return {.x = hidden_.data(),
          .weight = device_bf16(model_.weights().head.data),
          .width = model_.config().width,
          .share = static_cast<float>(share)};
}

}  // namespace twell
