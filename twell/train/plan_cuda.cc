// SPDX-License-Identifier: Apache-2.0
#include "twell/train/plan_cuda.h"

#include <algorithm>
#include <utility>

#include "twell/train/optimizer_cuda.h"
#include "twell/train/teacher_cuda.h"

namespace twell {
namespace {

FfnTrainShapeCuda ffn_shape(const ModelConfig& config, const TrainOptions& options) {
  return {.max_tokens = options.micro_batch_tokens(),
          .width = config.width,
          .ffn = config.ffn,
          .gated = config.gated,
          .biased = config.mlp_bias,
          .activation = config.activation};
}

}  // namespace

std::string cuda_run_unsupported(const ModelConfig& config, const TrainOptions& options) {
  if (options.compute != MatmulCompute::kF32) {
    return "--compute is for the CPU, a GPU multiplies bf16 anyway";
  }
  return cuda_training_unsupported(config, options.sequence_length);
}

std::vector<FfnExpectation> expected_executions(const CudaContext& ctx, const ModelConfig& config,
                                                const TrainOptions& options,
                                                std::span<const LayerHint> hints) {
  const FfnTrainShapeCuda shape = ffn_shape(config, options);
  const std::string no_hybrid = ffn_train_hybrid_unsupported(ctx, shape);
  // Layers without zeros run dense whatever the policy, also while they are blended with ReLU.
  TWELL_REQUIRE(no_hybrid.empty() || !leaves_zeros(config.activation) ||
                    options.ffn_policy != FfnTrainPolicy::kHybrid,
                "no hybrid feed-forward layers on this GPU: {}; use --ffn-policy auto", no_hybrid);
  std::vector<FfnExpectation> expected(static_cast<size_t>(config.layers));
  // Additional bytes of hybrid layers over dense ones: a larger workspace, less what each layer
  // saves.
  int64_t missing = FfnTrainWorkspaceCuda::bytes_needed(ctx, shape) -
                    FfnTrainWorkspaceCuda::bytes_needed(ctx, shape, /*hybrid=*/false);
  const int64_t dense_bytes =
      FfnSavedCuda::bytes_needed(shape, FfnTrainExecution::kDense, /*nnz=*/-1.0);
  for (size_t layer = 0; layer < expected.size(); ++layer) {
    FfnExpectation& out = expected[layer];
    // About half of the neurons of an untrained model are active: assumed without a hint.
    const LayerHint hint = hints.empty() ? LayerHint{} : hints[layer];
    out.nnz = hint.nnz < 0.0 ? static_cast<double>(config.ffn) / 2.0 : std::max(1.0, hint.nnz);
    out.union_neurons = hint.union_neurons;
    const double share =
        hint.union_neurons < 0.0 ? -1.0 : hint.union_neurons / static_cast<double>(config.ffn);
    out.execution =
        choose_gpu_ffn_train(gpu_ffn_layer(ctx, shape), shape.max_tokens, options.ffn_policy,
                             {.nnz_per_token = hint.nnz, .union_share = share});
    if (out.execution == FfnTrainExecution::kHybrid) {
      missing -= dense_bytes - TrainingCuda::ffn_saved_bytes(shape, out);
    }
  }
  // If only a few layers are hybrid, their workspace takes more memory than they save.
  if (options.ffn_policy == FfnTrainPolicy::kAuto && missing > 0) {
    for (FfnExpectation& out : expected) out.execution = FfnTrainExecution::kDense;
  }
  return expected;
}

TrainingPlanCuda training_plan(const CudaContext& ctx, const ModelConfig& config,
                               const TrainOptions& options, std::span<const LayerHint> hints) {
  TrainingPlanCuda plan{.shape = {options.micro_batch, options.sequence_length},
                        .document_mask = options.document_mask};
  std::vector<FfnExpectation> expected = expected_executions(ctx, config, options, hints);
  if (!hints.empty()) plan.ffn = std::move(expected);
  plan.may_become_hybrid = options.ffn_policy != FfnTrainPolicy::kDense;
  plan.distills = options.distill > 0.0;
  if (options.recompute) {
    plan.recompute = *options.recompute;
    return plan;
  }
  constexpr int64_t kSpare = int64_t{2} << 30;  // for estimation errors and other programs
  const int64_t free = free_device_bytes() - kSpare;
  const auto bytes = [&] {
    int64_t sum =
        OptimizerCuda::bytes_needed(config, options) + teacher_bytes(ctx, config, options);
    for (const MemoryItem& item : TrainingCuda::memory_plan(ctx, config, plan)) sum += item.bytes;
    return sum;
  };
  for (const RecomputeLevel level : {RecomputeLevel::kNone, RecomputeLevel::kNorms,
                                     RecomputeLevel::kInputs, RecomputeLevel::kQkv}) {
    plan.recompute = {level};
    if (bytes() <= free) break;
  }
  return plan;
}

int64_t teacher_bytes(const CudaContext& ctx, const ModelConfig& config,
                      const TrainOptions& options) {
  if (options.distill == 0.0) return 0;
  return TeacherForwardCuda::bytes_needed(ctx, config,
                                          {options.micro_batch, options.sequence_length});
}

RunPlan plan_run_cuda(const CudaContext& ctx, const ModelConfig& config,
                      const TrainOptions& options, int64_t shard_bytes,
                      std::span<const LayerHint> hints) {
  const std::string why = cuda_run_unsupported(config, options);
  TWELL_REQUIRE(why.empty(), "{}", why);
  RunPlan plan = plan_run_unknown_gpu(config, options, shard_bytes);
  plan.device_memory.front().bytes = OptimizerCuda::bytes_needed(config, options);
  const auto items =
      TrainingCuda::memory_plan(ctx, config, training_plan(ctx, config, options, hints));
  plan.device_memory.insert(plan.device_memory.end(), items.begin(), items.end());
  if (options.distill > 0.0) {
    plan.device_memory.push_back({"teacher", teacher_bytes(ctx, config, options)});
  }
  return plan;
}

int64_t free_device_bytes() {
  size_t free = 0, total = 0;
  TWELL_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return static_cast<int64_t>(free);
}

}  // namespace twell
