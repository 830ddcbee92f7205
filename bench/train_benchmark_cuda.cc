// SPDX-License-Identifier: Apache-2.0
#include "bench/train_benchmark_cuda.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "twell/base/gpu_code.h"
#include "twell/ops/matmul/matmul_cuda.h"

namespace twell {
namespace {

constexpr int64_t kWarmUpSteps = 3;  // for plans, graph capture, first replay

const char* stage_name(TrainingStage stage) {
  switch (stage) {
    case TrainingStage::kAttention:
      return "attention";
    case TrainingStage::kProjections:
      return "projections, rope";
    case TrainingStage::kFfn:
      return "ffn";
    case TrainingStage::kHead:
      return "head";
    case TrainingStage::kNorm:
    case TrainingStage::kEmbedding:
      break;
  }
  return "norms, embedding";
}

TrainOptions train_options(const ModelConfig& config, const TrainBenchmarkOptions& options) {
  TrainOptions train;
  train.sequence_length = options.length;
  train.micro_batch = options.micro_batch;
  train.learning_rate = 1e-4;
  train.validate_every = 0;
  train.ffn_policy = options.policy;
  train.recompute = options.recompute;
  train.moment_dtype = options.moment_dtype;
  train.gradient_dtype = options.gradient_dtype;
  train.document_mask = options.document_mask;
  train.ranks = options.ranks == nullptr ? 1 : options.ranks->size();
  train.seed = options.seed;
  return resolve_options(train, config);
}

// Random documents; their ends have a probability of 1 / 600 per token.
std::vector<int64_t> random_documents(const TrainOptions& train) {
  if (!train.document_mask) return {};
  constexpr int64_t kMeanTokens = 600;
  return document_lengths(random_tokens(train.micro_batch_tokens(), kMeanTokens, train.seed, 2),
                          train.sequence_length, /*end=*/0);
}

}  // namespace

TrainBenchmarkRun benchmark_training(cudaStream_t stream, Model& model,
                                     const TrainBenchmarkOptions& options) {
  CudaContext ctx(stream);
  // A portable build trains dense on products by mma.sync too.
  set_matmul_tuning(ctx, options.tune || kPortableBuild);
  const ModelConfig& config = model.config;
  const TrainOptions train = train_options(config, options);
  const int64_t tokens = train.micro_batch_tokens();
  TrainEngineCuda engine(ctx, model, nullptr, train, options.hints, options.ranks);
  engine.set_batch(random_tokens(tokens, config.vocab_size, options.seed, 0),
                   random_tokens(tokens, config.vocab_size, options.seed, 1),
                   random_documents(train));
  TrainEngineCuda::Hooks hooks;
  hooks.before_ffn = options.before_ffn;
  engine.set_hooks(hooks);

  int64_t done = 0;
  StepOutcome last;
  std::vector<LayerHint> hints = options.hints;
  const auto step = [&] {
    last = engine.step({.step = ++done, .learning_rate = 1e-4, .l1_coeff = 2e-5, .hints = hints});
    if (!options.hints.empty()) return;
    hints.clear();
    for (const LayerMetrics& layer : last.layers) {
      hints.push_back({layer.nnz, layer.union_neurons});
    }
  };
  for (int64_t i = 0; i < kWarmUpSteps; ++i) step();
  std::vector<double> seconds;
  TrainBenchmarkRun run;
  for (int64_t i = 0; i < options.steps; ++i) {
    const auto start = std::chrono::steady_clock::now();
    step();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    seconds.push_back(elapsed.count());
    run.device_bytes = std::max(run.device_bytes, engine.device_bytes());
  }
  TWELL_CHECK(std::isfinite(last.ce) && std::isfinite(last.grad_norm),
              "a step's loss is {} and its gradient's norm {}", last.ce, last.grad_norm);
  run.step = summarize(std::move(seconds));
  run.tokens_per_second = static_cast<double>(train.batch_tokens) / run.step.median;
  if (engine.peak_flops() > 0.0) {
    run.mfu = run.tokens_per_second * training_flops_per_token(config, train) /
              (engine.peak_flops() * static_cast<double>(train.ranks));
  }
  run.layers = last.layers;
  run.ce = last.ce;

  StageClock clock(stream);
  hooks.before_pass = [&] { clock.mark("begin"); };
  hooks.after_stage = [&](TrainingStage stage) { clock.mark(stage_name(stage)); };
  hooks.after_optimizer = [&] { clock.mark("optimizer"); };
  engine.set_hooks(hooks);
  step();
  run.stage_seconds = clock.seconds();
  if (options.ranks != nullptr) {
    const ExchangeSeconds exchange = engine.exchange_seconds();
    run.stage_seconds["wire: gradients"] = exchange.gradients;
    run.stage_seconds["wire: weights"] = exchange.weights;
  }
  return run;
}

int64_t largest_micro_batch(cudaStream_t stream, const ModelConfig& config,
                            TrainBenchmarkOptions options) {
  const CudaContext ctx(stream);
  size_t free = 0, all = 0;
  TWELL_CUDA_CHECK(cudaMemGetInfo(&free, &all));
  constexpr int64_t kSpare = int64_t{3} << 30;  // for captured patterns and estimation errors
  // With automatic recomputation each size would use a different level.
  if (!options.recompute) options.recompute = Recompute{RecomputeLevel::kQkv};
  const auto fits = [&](int64_t micro_batch) {
    options.micro_batch = micro_batch;
    const RunPlan plan =
        plan_run_cuda(ctx, config, train_options(config, options), 0, options.hints);
    return plan.device_bytes() + kSpare <= static_cast<int64_t>(free);
  };
  int64_t most = 1;
  while (fits(most + 1)) ++most;
  return most;
}

}  // namespace twell
