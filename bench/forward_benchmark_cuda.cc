// SPDX-License-Identifier: Apache-2.0
#include "bench/forward_benchmark_cuda.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "twell/ops/matmul/matmul_cuda.h"

namespace twell {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kDeviceHeadTokens = 4096;  // tokens per chunk of logits
constexpr int kFullRuns = 5;

const char* stage_name(ForwardStage stage) {
  switch (stage) {
    case ForwardStage::kEmbedding:
      return "embedding";
    case ForwardStage::kNorm:
      return "norm";
    case ForwardStage::kQkv:
      return "qkv";
    case ForwardStage::kAttention:
      return "attention";
    case ForwardStage::kOutput:
      return "output";
    case ForwardStage::kFfn:
      return "ffn";
  }
  return "";
}

ForwardPlanCuda plan_of(std::span<const int32_t> ids, int64_t length, FfnPolicy policy) {
  return {.max_tokens = std::ssize(ids),
          .max_sequences = std::ssize(ids) / length,
          .max_length = length,
          .ffn = policy};
}

}  // namespace

ForwardBenchmarkCuda::ForwardBenchmarkCuda(CudaContext& ctx, const ModelCuda& model,
                                           std::span<const int32_t> ids, int64_t length,
                                           FfnPolicy policy)
    : ctx_(ctx),
      model_(model),
      ids_(ids),
      sequences_(ids.size() / static_cast<size_t>(length), {.tokens = length, .slot = 0}),
      forward_((set_matmul_tuning(ctx, true), ctx), model, plan_of(ids, length, policy)),
      dense_(ctx, std::ssize(ids), model.config().width, model.padded_config().ffn,
             model.config().gated, model.config().activation, /*add=*/true),
      dense_plans_(ctx, model.config().layers, model.padded_config().ffn, FfnPolicy::kDense),
      logits_(std::min(kDeviceHeadTokens, std::ssize(ids)) * model.config().vocab_size),
      energy_(energy_meter(ctx)) {}

void ForwardBenchmarkCuda::body(const ForwardHooksCuda& hooks) {
  forward_.run(ids_, sequences_, nullptr, nullptr, hooks);
}

void ForwardBenchmarkCuda::head() {
  for (int64_t begin = 0; begin < std::ssize(ids_); begin += kDeviceHeadTokens) {
    const int64_t count = std::min(kDeviceHeadTokens, std::ssize(ids_) - begin);
    forward_.logits(forward_.hidden() + begin * model_.config().width, count, logits_.data());
  }
}

Timing ForwardBenchmarkCuda::time_full(const ForwardHooksCuda& hooks) {
  std::vector<double> seconds;
  for (int i = 0; i < kFullRuns + 1; ++i) {
    const CudaEvent begin = recorded_event(ctx_.stream());
    body(hooks);
    head();
    const CudaEvent end = recorded_event(ctx_.stream());
    end.synchronize();
    if (i > 0)
      seconds.push_back(1e-3 * end.milliseconds_since(begin));  // the first run only tunes the head
  }
  return summarize(seconds);
}

ForwardRunCuda ForwardBenchmarkCuda::measure(double window_seconds, const ForwardHooksCuda& hooks) {
  ForwardRunCuda run;
  run.full = time_full(hooks);  // also the warm-up

  // Keep two forwards enqueued, so that they run without gaps during the window.
  const Clock::time_point start = Clock::now();
  const double joules = energy_.joules();
  std::vector<CudaEvent> events;
  events.push_back(recorded_event(ctx_.stream()));
  double elapsed = 0.0;
  while (elapsed < window_seconds) {
    body(hooks);
    events.push_back(recorded_event(ctx_.stream()));
    if (events.size() > 2) events[events.size() - 2].synchronize();
    elapsed = std::chrono::duration<double>(Clock::now() - start).count();
  }
  events.back().synchronize();
  elapsed = std::chrono::duration<double>(Clock::now() - start).count();
  const double used = energy_.joules() - joules;
  std::vector<double> seconds;
  for (size_t i = 1; i < events.size(); ++i) {
    seconds.push_back(1e-3 * events[i].milliseconds_since(events[i - 1]));
  }
  run.body = summarize(seconds);
  run.joules_per_token =
      used / (static_cast<double>(seconds.size()) * static_cast<double>(ids_.size()));
  run.watts = used / elapsed;

  StageClock clock(ctx_.stream());
  ForwardHooksCuda marked = hooks;
  marked.after_stage = [&](ForwardStage stage) { clock.mark(stage_name(stage)); };
  done_ = [&](bool gate) { clock.mark(gate ? "ffn gate" : "ffn up and down"); };
  clock.mark("begin");
  body(marked);
  done_ = [](bool) {};
  run.stage_seconds = clock.seconds();
  return run;
}

ForwardRunCuda ForwardBenchmarkCuda::dense(double window_seconds) {
  const bool gated = model_.config().gated;
  ForwardHooksCuda hooks;
  hooks.ffn = [&](int64_t layer, const FfnForwardCuda& problem) {
    if (problem.in_bytes()) return dense_bytes(layer, problem);
    if (!dense_tuned_) dense_.tune(ctx_, problem.weights, problem.x, problem.y);
    dense_tuned_ = true;
    if (!gated) return dense_.forward(ctx_, problem.weights, problem.x, problem.y);
    dense_.gate(ctx_, problem.weights, problem.x);
    done_(true);
    dense_.up_down(ctx_, problem.weights, problem.x, problem.y);
    done_(false);
  };
  ForwardRunCuda run = measure(window_seconds, hooks);
  run.executions.assign(static_cast<size_t>(model_.config().layers), "dense");
  return run;
}

ForwardRunCuda ForwardBenchmarkCuda::sparse(double window_seconds, PatternReplayCuda* replay) {
  const int64_t layers = model_.config().layers;
  if (replay != nullptr) {
    ForwardHooksCuda hooks;
    hooks.ffn = [&](int64_t layer, const FfnForwardCuda& problem) {
      replay->forward(layer, problem, [&](bool gate) { done_(gate); });
    };
    ForwardRunCuda run = measure(window_seconds, hooks);
    for (int64_t layer = 0; layer < layers; ++layer) {
      run.nnz_per_token.push_back(replay->nnz_per_token(layer));
    }
    run.executions.assign(static_cast<size_t>(layers), "tile-union, replayed");
    return run;
  }
  // The first pass measures activity, the others run the choice; behind a screen, the second one
  // measures its candidates.
  for (int i = 0; i < 3; ++i) {
    body({});
    forward_.ffn_plans().update(ctx_);
  }
  ForwardRunCuda run = measure(window_seconds, {});
  forward_.ffn_plans().update(ctx_);
  for (int64_t layer = 0; layer < layers; ++layer) {
    const FfnPlan& plan = forward_.ffn_plans()[layer].plan;
    run.nnz_per_token.push_back(plan.nnz_per_token());
    run.executions.emplace_back(plan.execution.name);
    run.checked_pairs += plan.checked_pairs;
    run.missed_pairs += plan.missed_pairs;
  }
  run.rotated_bytes = forward_.rotated_memory();
  return run;
}

void ForwardBenchmarkCuda::dense_bytes(int64_t layer, const FfnForwardCuda& problem) {
  ffn_forward_cuda(ctx_, problem, dense_plans_[layer], forward_.ffn_workspace());
}

double ForwardBenchmarkCuda::sparse_error() {
  const int64_t n = std::min<int64_t>(std::ssize(ids_), kDeviceHeadTokens) * model_.config().width;
  const auto hidden = [&] {
    std::vector<BF16> values(static_cast<size_t>(n));
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
    TWELL_CUDA_CHECK(cudaMemcpy(values.data(), forward_.hidden(), values.size() * sizeof(BF16),
                                cudaMemcpyDeviceToHost));
    return values;
  };
  ForwardHooksCuda hooks;
  hooks.ffn = [&](int64_t layer, const FfnForwardCuda& problem) {
    if (problem.in_bytes()) return dense_bytes(layer, problem);
    dense_.forward(ctx_, problem.weights, problem.x, problem.y);
  };
  body(hooks);
  const std::vector<BF16> want = hidden();
  body({});
  const std::vector<BF16> got = hidden();
  double error = 0.0, size = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double difference = static_cast<double>(to_float(got[i])) - to_float(want[i]);
    error += difference * difference;
    size += static_cast<double>(to_float(want[i])) * to_float(want[i]);
  }
  return std::sqrt(error / size);
}

}  // namespace twell
