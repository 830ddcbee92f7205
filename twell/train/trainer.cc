// SPDX-License-Identifier: Apache-2.0
#include "twell/train/trainer.h"

#include <chrono>
#include <cmath>
#include <utility>

#include "twell/checkpoint/checkpoint.h"
#include "twell/data/batch_sampler.h"
#include "twell/ops/adamw/adamw.h"
#include "twell/train/plan.h"
#include "twell/train/trainer_state.h"

namespace twell {
namespace {

// Exponential average over a few steps, so that a layer near the threshold does not switch its
// execution in every step. Negative values are unknown.
void smooth(double newest, double& value) {
  constexpr double kNewest = 0.2;
  value = value < 0.0 || newest < 0.0 ? newest : value + kNewest * (newest - value);
}

}  // namespace

Trainer::Trainer(Context& ctx, TrainEngine& engine, const TrainingData& data,
                 const TrainOptions& options, std::string data_identity)
    : ctx_(ctx),
      engine_(engine),
      options_(options),
      data_identity_(std::move(data_identity)),
      flops_per_token_(training_flops_per_token(engine.model().config, options)) {
  // Refuse a validation split without a window now, not at the first validation.
  if (options.validate_every > 0) {
    BatchSampler(data, Split::kValidation, options.sequence_length, 0, false);
  }
}

StepMetrics Trainer::train_step(Clock::time_point start) {
  Communicator* const ranks = engine_.ranks();
  StepMetrics metrics;
  metrics.step = step_ + 1;
  metrics.tokens = metrics.step * options_.batch_tokens;
  metrics.learning_rate = learning_rate_at(options_, step_);
  metrics.l1_coeff = l1_coeff_at(options_, step_, engine_.model().config.ffn);
  if (options_.relufy_from != Activation::kRelu) {
    metrics.relu_share = relu_share_at(options_, step_);
  }
  if (ranks != nullptr) ranks->rendezvous().set_step(metrics.step);
  const StepOutcome outcome = engine_.step({.step = metrics.step,
                                            .learning_rate = metrics.learning_rate,
                                            .l1_coeff = metrics.l1_coeff,
                                            .relu_share = metrics.relu_share,
                                            .hints = hints_});
  const std::string whose =
      outcome.culprit < 0 ? std::string() : fmt::format(" on rank {}", outcome.culprit);
  if (!std::isfinite(outcome.ce)) {
    throw DivergenceError(
        fmt::format("the loss is {} at step {}{}", outcome.ce, metrics.step, whose));
  }
  if (!std::isfinite(outcome.grad_norm)) {
    throw DivergenceError(fmt::format("the gradient's norm is {} at step {}{}", outcome.grad_norm,
                                      metrics.step, whose));
  }
  ++step_;
  const std::chrono::duration<double> elapsed = Clock::now() - start;
  measure(outcome, elapsed.count(), metrics);
  return metrics;
}

void Trainer::measure(const StepOutcome& outcome, double seconds, StepMetrics& metrics) {
  metrics.ce = outcome.ce;
  metrics.ce_in_bf16 = engine_.rounds_logits();
  if (options_.distill > 0.0) metrics.kl = outcome.kl;
  metrics.grad_norm = outcome.grad_norm;
  metrics.layers = outcome.layers;
  hints_.resize(metrics.layers.size());
  for (size_t i = 0; i < metrics.layers.size(); ++i) {
    const LayerMetrics& layer = metrics.layers[i];
    smooth(layer.nnz, hints_[i].nnz);
    smooth(layer.union_neurons, hints_[i].union_neurons);
    metrics.l1 += layer.l1 / static_cast<double>(metrics.layers.size());
  }
  metrics.seconds = seconds;
  metrics.tokens_per_second = static_cast<double>(options_.batch_tokens) / seconds;
  if (engine_.peak_flops() > 0.0) {
    metrics.mfu = metrics.tokens_per_second * flops_per_token_ /
                  (engine_.peak_flops() * engine_.layout().ranks());
  }
  metrics.device_bytes = engine_.device_bytes();
}

void Trainer::save(const std::filesystem::path& checkpoint) const {
  engine_.read_state([&](const OptimizerTensors& state) {
    if (!std::isfinite(global_norm(ctx_, state.weights))) {
      throw DivergenceError(fmt::format("a weight is not a finite number after step {}", step_));
    }
    const ShardLayout& layout = engine_.layout();
    if (layout.rank() == 0) save_model(engine_.model(), checkpoint, options_.save_dtype);
    OptimizerTensors tensors = state;
    if (options_.save_dtype == DType::kF32) tensors.weights = {};  // model.safetensors has them
    save_trainer_state(checkpoint, {step_, trajectory_text(options_), data_identity_, hints_},
                       tensors, layout);
  });
}

void Trainer::restore(const std::filesystem::path& checkpoint) {
  TrainerState saved;
  engine_.write_state([&](const OptimizerTensors& state) {
    saved = load_trainer_state(checkpoint, state, engine_.layout());
    require_same_trajectory(saved.trajectory, trajectory_text(options_));
    TWELL_REQUIRE(saved.data == data_identity_,
                  "cannot resume on other data: the run was trained on tokens '{}', these are '{}'",
                  saved.data, data_identity_);
    const int64_t layers = engine_.model().config.layers;
    TWELL_REQUIRE(saved.hints.empty() || static_cast<int64_t>(saved.hints.size()) == layers,
                  "{}: the trainer state is of a model with {} layers, not {}", checkpoint.string(),
                  saved.hints.size(), layers);
  });
  hints_ = saved.hints;
  step_ = saved.step;
}

}  // namespace twell
