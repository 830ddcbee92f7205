// SPDX-License-Identifier: Apache-2.0
// Forward and backward of one micro-batch of the tiny preset, 8 x 256 tokens, and of its parts, one
// layer each. CPU time is of all threads and varies less than real time on a busy machine;
// OMP_WAIT_POLICY=passive keeps waiting out of it. The same step in PyTorch:
// bench/pytorch/train_step.py.
#include <benchmark/benchmark.h>

#include <vector>

#include "twell/base/rng.h"
#include "twell/model/activations.h"
#include "twell/model/training.h"
#include "twell/ops/cross_entropy/cross_entropy.h"
#include "twell/ops/matmul/matmul.h"
#include "twell/ops/rms_norm/rms_norm.h"

namespace twell {
namespace {

constexpr MicroBatchShape kShape = {8, 256};
constexpr int64_t kTokens = kShape.sequences * kShape.length;

// A step that was run once, so that every buffer holds realistic values.
struct Step {
  // aversion shifts the gates of the neurons from none to this much, which sets the sparsity.
  Step(FfnTrainPolicy policy, float aversion) : model(preset_config("tiny")) {
    init_weights(ctx, model, 1);
    const auto mutable_weights = model_matrices<float>(model.config, model.flat.data());
    for (int64_t v = 0; v < model.config.vocab_size; ++v) mutable_weights.embedding(v, 0) = 0.1f;
    for (const LayerMatrices<float>& layer : mutable_weights.layers) {
      for (int64_t f = 0; f < model.config.ffn; ++f) layer.ffn.firing()(f, 0) -= aversion;
    }
    for (uint64_t i = 0; i <= kTokens; ++i) {
      ids.push_back(static_cast<int32_t>(uniform_below(1, 0, i, 4096)));
    }
    batch.inputs = std::span(ids).first(kTokens);
    batch.targets = std::span(ids).subspan(1);
    batch.step_tokens = kTokens;
    batch.l1_coeff = 2e-5f;
    batch.policy = policy;
    run();
  }
  TrainingResult run() { return forward_backward(ctx, model, batch, state, grad.span()); }

  Context ctx{2};
  Model model;
  TrainingState state{model.config, kShape};
  Buffer<float> grad{model.config.parameter_count()};
  ModelMatrices<float> grads = model_matrices<float>(model.config, grad.data());
  std::vector<int32_t> ids;
  TrainingBatch batch;
};

void set_tokens(benchmark::State& bench) {
  bench.counters["tokens/s"] = benchmark::Counter(static_cast<double>(kTokens * bench.iterations()),
                                                  benchmark::Counter::kIsRate);
}

void whole_step(benchmark::State& bench, FfnTrainPolicy policy, float aversion) {
  Step step(policy, aversion);
  int64_t nnz = 0;
  for (const FfnTrainStats& layer : step.run().layers) nnz += layer.nnz;
  bench.counters["nnz/token"] =
      static_cast<double>(nnz) / static_cast<double>(kTokens * step.model.config.layers);
  for (auto _ : bench) step.run();
  set_tokens(bench);
}
BENCHMARK_CAPTURE(whole_step, dense_half_active, FfnTrainPolicy::kDense, 0.0f)
    ->UseRealTime()
    ->MeasureProcessCPUTime();
BENCHMARK_CAPTURE(whole_step, dense_sparse, FfnTrainPolicy::kDense, 0.3f)
    ->UseRealTime()
    ->MeasureProcessCPUTime();
BENCHMARK_CAPTURE(whole_step, hybrid_sparse, FfnTrainPolicy::kHybrid, 0.3f)
    ->UseRealTime()
    ->MeasureProcessCPUTime();

// The parts, on the first layer of a dense step. fn(step) runs one of them.
template <typename Fn>
void part(benchmark::State& bench, const Fn& fn) {
  Step step(FfnTrainPolicy::kDense, 0.0f);
  for (auto _ : bench) fn(step);
  set_tokens(bench);
}

void attention_forward(benchmark::State& bench) {
  part(bench, [](Step& step) {
    const ModelConfig& config = step.model.config;
    TrainingState::Activations& act = step.state.activations();
    const LayerActivations& layer = act.views.layers[0];
    const QkvViews qkv = split_qkv(config, layer.qkv);
    attention_forward(step.ctx, {.shape = {config.heads, config.kv_heads, config.head_dim},
                                 .sequences = act.sequences(qkv),
                                 .q = qkv.q,
                                 .out = layer.attended,
                                 .logsumexp = layer.logsumexp});
  });
}
BENCHMARK(attention_forward)->UseRealTime()->MeasureProcessCPUTime();

void attention_backward(benchmark::State& bench) {
  part(bench, [](Step& step) {
    const ModelConfig& config = step.model.config;
    TrainingState::Activations& act = step.state.activations();
    const LayerActivations& layer = act.views.layers[0];
    const QkvViews qkv = split_qkv(config, layer.qkv), d_qkv = split_qkv(config, act.views.d_qkv);
    attention_backward(step.ctx, {.shape = {config.heads, config.kv_heads, config.head_dim},
                                  .sequences = act.sequences(qkv),
                                  .q = qkv.q,
                                  .out = layer.attended,
                                  .logsumexp = layer.logsumexp,
                                  .d_out = act.views.d_attended,
                                  .d_q = d_qkv.q,
                                  .d_k = d_qkv.k,
                                  .d_v = d_qkv.v});
  });
}
BENCHMARK(attention_backward)->UseRealTime()->MeasureProcessCPUTime();

void qkv_forward(benchmark::State& bench) {
  part(bench, [](Step& step) {
    const LayerActivations& layer = step.state.activations().views.layers[0];
    linear_forward(step.ctx, layer.attention_normed, step.model.weights.layers[0].w_qkv, layer.qkv);
  });
}
BENCHMARK(qkv_forward)->UseRealTime()->MeasureProcessCPUTime();

void qkv_backward(benchmark::State& bench) {
  part(bench, [](Step& step) {
    const ActivationViews& views = step.state.activations().views;
    linear_backward(step.ctx, {.x = views.layers[0].attention_normed,
                               .weight = step.model.weights.layers[0].w_qkv,
                               .d_y = views.d_qkv,
                               .d_x = views.d_normed,
                               .d_weight = step.grads.layers[0].w_qkv});
  });
}
BENCHMARK(qkv_backward)->UseRealTime()->MeasureProcessCPUTime();

void ffn_forward(benchmark::State& bench) {
  part(bench, [](Step& step) {
    TrainingState::Activations& act = step.state.activations();
    ffn_train_forward(step.ctx,
                      {.weights = step.model.weights.layers[0].ffn,
                       .x = act.views.layers[0].ffn_normed,
                       .y = act.views.delta,
                       .policy = FfnTrainPolicy::kDense},
                      act.ffn[0]);
  });
}
BENCHMARK(ffn_forward)->UseRealTime()->MeasureProcessCPUTime();

void ffn_backward(benchmark::State& bench) {
  part(bench, [](Step& step) {
    TrainingState::Activations& act = step.state.activations();
    ffn_train_backward(step.ctx,
                       {.weights = step.model.weights.layers[0].ffn,
                        .x = act.views.layers[0].ffn_normed,
                        .d_y = act.views.d_residual,
                        .l1_scale = 1e-9f,
                        .d_x = act.views.d_normed,
                        .grads = step.grads.layers[0].ffn},
                       act.ffn[0]);
  });
}
BENCHMARK(ffn_backward)->UseRealTime()->MeasureProcessCPUTime();

void head_and_loss(benchmark::State& bench) {
  part(bench, [](Step& step) {
    const ActivationViews& views = step.state.activations().views;
    cross_entropy(step.ctx, {.x = views.final_normed,
                             .weight = step.model.weights.head,
                             .targets = step.batch.targets,
                             .grad_scale = 1e-9f,
                             .d_x = views.d_normed,
                             .d_weight = step.grads.head});
  });
}
BENCHMARK(head_and_loss)->UseRealTime()->MeasureProcessCPUTime();

void norm_backward(benchmark::State& bench) {
  part(bench, [](Step& step) {
    const ActivationViews& views = step.state.activations().views;
    rms_norm_backward(step.ctx, {.s = views.layers[0].ffn_in,
                                 .weight = step.model.weights.layers[0].ffn_norm,
                                 .inv_rms = views.layers[0].ffn_inv_rms,
                                 .d_y = views.d_normed,
                                 .d_s = views.d_residual,
                                 .d_weight = step.grads.layers[0].ffn_norm});
  });
}
BENCHMARK(norm_backward)->UseRealTime()->MeasureProcessCPUTime();

}  // namespace
}  // namespace twell

BENCHMARK_MAIN();
