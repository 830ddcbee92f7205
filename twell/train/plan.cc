// SPDX-License-Identifier: Apache-2.0
#include "twell/train/plan.h"

namespace twell {
namespace {

// Resident besides what is planned: the program and its libraries (11 MiB before it does anything),
// compiled GEMM kernels and a tokenizer, as measured on the smallest preset.
constexpr int64_t kProcessBytes = int64_t{24} << 20;

}  // namespace

int64_t RunPlan::memory_bytes() const {
  int64_t total = 0;
  for (const MemoryItem& item : memory) total += item.bytes;
  return total;
}

RunPlan plan_run(const ModelConfig& config, const TrainOptions& options) {
  RunPlan plan;
  plan.parameters = config.parameter_count();
  const int64_t flat_bytes = plan.parameters * static_cast<int64_t>(sizeof(float));
  plan.memory = {{"weights (f32)", flat_bytes},
                 {"gradients (f32)", flat_bytes},
                 {"AdamW moments (2 x f32)", 2 * flat_bytes}};
  const auto activations =
      TrainingState::memory_plan(config, {options.micro_batch, options.sequence_length});
  plan.memory.insert(plan.memory.end(), activations.begin(), activations.end());

  plan.memory.push_back({"program, libraries, tokenizer (estimate)", kProcessBytes});

  // The backward pass multiplies twice for every multiplication of the forward pass.
  plan.flops_per_token = 3.0 * config.forward_flops_per_token(options.sequence_length);
  plan.flops_per_step = plan.flops_per_token * static_cast<double>(options.batch_tokens);
  return plan;
}

}  // namespace twell
