// SPDX-License-Identifier: Apache-2.0
#include "twell/train/plan.h"

#include <algorithm>

namespace twell {
namespace {

// Resident memory without an item of its own, measured on the smallest preset: 12 MiB of program
// and libraries; the rest is compiled GEMM kernels, the tokenizer, and leftovers of making shards.
constexpr int64_t kProcessBytes = int64_t{32} << 20;

// On Linux a page fault in a mapped file maps up to 16 pages around it.
constexpr int64_t kReadAroundBytes = int64_t{64} << 10;

int64_t mapped_bytes(const TrainOptions& options, int64_t shard_bytes) {
  const double windows =
      static_cast<double>(options.steps) * static_cast<double>(options.batch_sequences()) +
      static_cast<double>(options.validation_sequences);
  const double window_bytes = static_cast<double>(options.sequence_length * 4 + kReadAroundBytes);
  return static_cast<int64_t>(std::min(static_cast<double>(shard_bytes), windows * window_bytes));
}

int64_t total(const std::vector<MemoryItem>& items) {
  int64_t bytes = 0;
  for (const MemoryItem& item : items) bytes += item.bytes;
  return bytes;
}

}  // namespace

int64_t RunPlan::memory_bytes() const { return total(memory); }
int64_t RunPlan::device_bytes() const { return total(device_memory); }

int64_t checkpoint_bytes(const ModelConfig& config, const TrainOptions& options) {
  const bool exact = options.save_dtype == DType::kF32;
  const auto value = static_cast<int64_t>(sizeof(float));
  return config.parameter_count() * (exact ? 3 * value : 3 * value + value / 2);
}

RunPlan plan_without_engine(const ModelConfig& config, const TrainOptions& options,
                            int64_t shard_bytes) {
  RunPlan plan;
  plan.parameters = config.parameter_count();
  plan.memory = {{"program, libraries, tokenizer (estimate)", kProcessBytes}};
  plan.mapped_bytes = mapped_bytes(options, shard_bytes);
  plan.flops_per_token = training_flops_per_token(config, options);
  plan.flops_per_step = plan.flops_per_token * static_cast<double>(options.batch_tokens);
  return plan;
}

RunPlan plan_run(const ModelConfig& config, const TrainOptions& options, int64_t shard_bytes) {
  RunPlan plan = plan_without_engine(config, options, shard_bytes);
  const int64_t flat_bytes = plan.parameters * static_cast<int64_t>(sizeof(float));
  std::vector<MemoryItem> items = {
      {"weights (f32)", flat_bytes},
      {"gradients (f32)", flat_bytes},
      {options.ranks == 1 ? "AdamW moments (2 x f32)"
                          : "AdamW moments (2 x f32), this rank's shard",
       2 * flat_bytes / options.ranks}};
  const auto activations =
      TrainingState::memory_plan(config, {options.micro_batch, options.sequence_length});
  items.insert(items.end(), activations.begin(), activations.end());
  if (options.distill > 0.0) {
    const int64_t hidden = options.micro_batch_tokens() * config.width;
    items.push_back({"teacher", flat_bytes + hidden * static_cast<int64_t>(sizeof(float))});
  }
  plan.memory.insert(plan.memory.begin(), items.begin(), items.end());
  return plan;
}

RunPlan plan_run_unknown_gpu(const ModelConfig& config, const TrainOptions& options,
                             int64_t shard_bytes) {
  RunPlan plan = plan_without_engine(config, options, shard_bytes);
  const int64_t flat_bytes = plan.parameters * static_cast<int64_t>(sizeof(float));
  plan.memory.insert(plan.memory.begin(), {{"weights (f32), for checkpoints", flat_bytes},
                                           {"AdamW moments, while a checkpoint is written",
                                            2 * flat_bytes / options.ranks}});
  // bf16 weights and f32 gradients, and of this rank's shard the lower halves of the f32 weights.
  const int64_t moment_bytes = options.moment_dtype == DType::kBF16 ? 2 : 4;
  plan.device_memory = {
      {"weights, gradients, AdamW moments",
       6 * plan.parameters + plan.parameters / options.ranks * (2 + 2 * moment_bytes)}};
  return plan;
}

// The backward pass has two multiplications for each one of the forward pass.
double training_flops_per_token(const ModelConfig& config, const TrainOptions& options) {
  return 3.0 * config.forward_flops_per_token(options.sequence_length);
}

double stated_peak_flops(std::string_view device_name) {
  struct Row {
    std::string_view part;  // part of the name; the first match counts
    double teraflops;
  };
  // These are from the data sheets, without structured sparsity.
  static constexpr Row kRows[] = {{"H200 NVL", 835.5}, {"H100 NVL", 835.5}, {"H100 PCIe", 756.0},
                                  {"GH200", 989.4},    {"H200", 989.4},     {"H100", 989.4},
                                  {"A100", 312.0},     {"A800", 312.0},     {"H800", 989.4}};
  for (const Row& row : kRows) {
    if (device_name.find(row.part) != std::string_view::npos) return row.teraflops * 1e12;
  }
  return 0.0;
}

}  // namespace twell
