// SPDX-License-Identifier: Apache-2.0
#include "bench/train_benchmark_cuda.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "twell/base/rng.h"
#include "twell/ops/matmul/matmul_cuda.h"

namespace twell {
namespace {

constexpr int64_t kWarmUpSteps = 3;  // plans, the capture of a graph, its first replay

// The stages of a step by name, each from the event before it to its own.
class StageClock {
 public:
  explicit StageClock(cudaStream_t stream) : stream_(stream) {}

  void mark(const char* name) {
    marks_.emplace_back(name, CudaEvent(CudaEvent::Timing::kOn));
    marks_.back().second.record(stream_);
  }
  // All have happened.
  std::map<std::string, double> seconds() const {
    std::map<std::string, double> sums;
    for (size_t i = 1; i < marks_.size(); ++i) {
      sums[marks_[i].first] += marks_[i].second.milliseconds_since(marks_[i - 1].second) * 1e-3;
    }
    return sums;
  }

 private:
  cudaStream_t stream_;
  std::vector<std::pair<const char*, CudaEvent>> marks_;
};

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
  train.seed = options.seed;
  return resolve_options(train, config);
}

std::vector<int32_t> random_tokens(int64_t count, int64_t vocab, uint64_t seed, uint64_t stream) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) {
    ids.push_back(static_cast<int32_t>(
        uniform_below(seed, stream, static_cast<uint64_t>(i), static_cast<uint64_t>(vocab))));
  }
  return ids;
}

}  // namespace

TrainBenchmarkRun benchmark_training(cudaStream_t stream, Model& model,
                                     const TrainBenchmarkOptions& options) {
  constexpr uint64_t kStream = 0x62656e6368;  // "bench": apart from the streams of the weights
  CudaContext ctx(stream);
  set_matmul_tuning(ctx, options.tune);
  const ModelConfig& config = model.config;
  const TrainOptions train = train_options(config, options);
  const int64_t tokens = train.micro_batch_tokens();
  TrainEngineCuda engine(ctx, model, nullptr, train, options.hints);
  engine.set_batch(random_tokens(tokens, config.vocab_size, options.seed, kStream),
                   random_tokens(tokens, config.vocab_size, options.seed, kStream + 1));
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
  std::sort(seconds.begin(), seconds.end());
  run.seconds = seconds[seconds.size() / 2];
  run.p10 = seconds[seconds.size() / 10];
  run.p90 = seconds[seconds.size() * 9 / 10];
  run.tokens_per_second = static_cast<double>(tokens) / run.seconds;
  if (engine.peak_flops() > 0.0) {
    run.mfu = run.tokens_per_second * training_flops_per_token(config, train) / engine.peak_flops();
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
  return run;
}

int64_t largest_micro_batch(cudaStream_t stream, const ModelConfig& config,
                            TrainBenchmarkOptions options) {
  const CudaContext ctx(stream);
  size_t free = 0, all = 0;
  TWELL_CUDA_CHECK(cudaMemGetInfo(&free, &all));
  constexpr int64_t kSpare = int64_t{3} << 30;  // captured patterns, and estimates that are off
  // What is automatic would recompute no more than it has to, by a measure of its own.
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
