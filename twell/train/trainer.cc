// SPDX-License-Identifier: Apache-2.0
#include "twell/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "twell/model/checkpoint.h"
#include "twell/ops/adamw/adamw.h"
#include "twell/train/schedule.h"
#include "twell/train/trainer_state.h"
#include "twell/train/validation.h"

namespace twell {
namespace {

// Tokens of a micro-batch, as sizes of the id buffers.
size_t batch_size(const TrainOptions& options) {
  return static_cast<size_t>(options.micro_batch_tokens());
}

}  // namespace

Trainer::Trainer(Context& ctx, Model& model, const ShardSet& shards, const TrainOptions& options,
                 std::string data_identity, const Model* teacher)
    : ctx_(ctx),
      model_(model),
      shards_(shards),
      options_(options),
      data_identity_(std::move(data_identity)),
      sampler_(shards, Split::kTrain, options.sequence_length, options.seed, true),
      state_(model.config, {options.micro_batch, options.sequence_length}),
      optimizer_(model),
      activity_(model.config),
      grads_(model.flat.size()),
      inputs_(batch_size(options)),
      targets_(batch_size(options)),
      teacher_(teacher) {
  TWELL_CHECK((teacher != nullptr) == (options.distill > 0.0), "a distillation share of {} {}",
              options.distill, teacher == nullptr ? "without a teacher" : "with a teacher");
  if (teacher != nullptr) {
    TWELL_CHECK(teacher->config.vocab_size == model.config.vocab_size,
                "a teacher of {} tokens for a model of {}", teacher->config.vocab_size,
                model.config.vocab_size);
    teacher_state_.emplace(teacher->config, FfnPolicy::kAuto);
    teacher_hidden_ = Buffer<float>(options.micro_batch_tokens() * teacher->config.width);
  }
  // In one block, before the ops of a first step would take it in pieces of growing size.
  ctx.scratch().reserve(static_cast<size_t>(
      TrainingState::scratch_bytes(model.config, {options.micro_batch, options.sequence_length})));
  // Refuses a validation split without one window now, not at the first validation.
  if (options.validate_every > 0) {
    BatchSampler(shards, Split::kValidation, options.sequence_length, 0, false);
  }
}

void Trainer::read_micro_batch(int64_t micro_batch) {
  const int64_t first = step_ * options_.batch_sequences() + micro_batch * options_.micro_batch;
  const size_t length = static_cast<size_t>(options_.sequence_length);
  for (int64_t i = 0; i < options_.micro_batch; ++i) {
    const size_t at = static_cast<size_t>(i) * length;
    sampler_.sequence(first + i, std::span(inputs_).subspan(at, length),
                      std::span(targets_).subspan(at, length));
  }
}

void Trainer::ask_teacher(TrainingBatch& batch) {
  const MatrixF hidden =
      teacher_hidden_.matrix(options_.micro_batch_tokens(), teacher_->config.width);
  const std::vector<ForwardSequence> sequences(static_cast<size_t>(options_.micro_batch),
                                               {.tokens = options_.sequence_length});
  forward(ctx_, *teacher_, *teacher_state_,
          {.ids = inputs_, .sequences = sequences, .hidden = hidden});
  batch.teacher_hidden = hidden;
  batch.teacher_head = teacher_->weights.head;
  batch.teacher_share = static_cast<float>(options_.distill);
}

Trainer::StepLoss Trainer::accumulate_gradients(const StepMetrics& metrics) {
  ctx_.parallel_for(grads_.size(), 1 << 16, [&](int64_t begin, int64_t end, int) {
    std::fill(grads_.data() + begin, grads_.data() + end, 0.0f);
  });
  activity_.clear();
  StepLoss loss;
  int64_t tokens = 0;
  for (int64_t i = 0; i < options_.micro_batches(); ++i) {
    read_micro_batch(i);
    TrainingBatch batch;
    batch.inputs = inputs_;
    batch.targets = targets_;
    batch.step_tokens = options_.batch_tokens;
    batch.l1_coeff = static_cast<float>(metrics.l1_coeff);
    if (metrics.relu_share) {
      batch.activation = {options_.relufy_from, static_cast<float>(*metrics.relu_share)};
    }
    if (teacher_ != nullptr) ask_teacher(batch);
    batch.policy = options_.ffn_policy;
    batch.nnz_hint = nnz_hint_;
    batch.active = &activity_.active();
    const TrainingResult result = forward_backward(ctx_, model_, batch, state_, grads_.span());
    activity_.add(result.layers);
    loss.ce += result.loss_sum;
    loss.kl += result.kl_sum;
    tokens += result.loss_tokens;
  }
  const double count = static_cast<double>(std::max<int64_t>(tokens, 1));
  return {loss.ce / count, loss.kl / count};
}

StepMetrics Trainer::train_step() {
  const auto start = std::chrono::steady_clock::now();
  StepMetrics metrics;
  metrics.step = step_ + 1;
  metrics.tokens = metrics.step * options_.batch_tokens;
  metrics.learning_rate = learning_rate_at(options_, step_);
  metrics.l1_coeff = l1_coeff_at(options_, step_, model_.config.ffn);

  if (options_.relufy_from != Activation::kRelu) {
    metrics.relu_share = relu_share_at(options_, step_);
  }
  const StepLoss loss = accumulate_gradients(metrics);
  metrics.ce = loss.ce;
  if (teacher_ != nullptr) metrics.kl = loss.kl;
  if (!std::isfinite(metrics.ce)) {
    throw DivergenceError(fmt::format("the loss is {} at step {}", metrics.ce, metrics.step));
  }
  metrics.grad_norm = global_norm(ctx_, grads_.span());
  if (!std::isfinite(metrics.grad_norm)) {
    throw DivergenceError(
        fmt::format("the gradient's norm is {} at step {}", metrics.grad_norm, metrics.step));
  }
  optimizer_.step(ctx_, options_, metrics.step, metrics.grad_norm, grads_.span(), model_);
  if (options_.reinit_dead) {
    reinit_dead_neurons(ctx_, options_, metrics.step, activity_.active(), model_);
  }

  metrics.layers = activity_.metrics();
  // Smoothed over a few steps: a layer near the limit should not change its execution every step.
  constexpr double kNewest = 0.2;
  const bool first = nnz_hint_.empty();
  nnz_hint_.resize(metrics.layers.size());
  for (size_t i = 0; i < metrics.layers.size(); ++i) {
    const LayerMetrics& layer = metrics.layers[i];
    nnz_hint_[i] = first ? layer.nnz : nnz_hint_[i] + kNewest * (layer.nnz - nnz_hint_[i]);
    metrics.l1 += layer.l1 / static_cast<double>(metrics.layers.size());
  }
  ++step_;
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  metrics.seconds = elapsed.count();
  metrics.tokens_per_second = static_cast<double>(options_.batch_tokens) / metrics.seconds;
  return metrics;
}

double Trainer::validate() const {
  // Half a training micro-batch at a time: its scratch fits into what training has reserved.
  ValidationOptions validation;
  validation.sequences = options_.validation_sequences;
  validation.length = options_.sequence_length;
  validation.micro_batch = std::max<int64_t>(1, options_.micro_batch / 2);
  return validation_cross_entropy(ctx_, model_, shards_, validation);
}

void Trainer::save(const std::filesystem::path& checkpoint) const {
  if (!std::isfinite(global_norm(ctx_, model_.flat.span()))) {
    throw DivergenceError(fmt::format("a weight is no finite number after step {}", step_));
  }
  save_model(model_, checkpoint, options_.save_dtype);
  OptimizerTensors tensors{optimizer_.exp_avg(), optimizer_.exp_avg_sq(), {}};
  if (options_.save_dtype != DType::kF32) tensors.weights = model_.flat.span();
  save_trainer_state(checkpoint, {step_, trajectory_json(options_), data_identity_, nnz_hint_},
                     tensors);
}

void Trainer::restore(const std::filesystem::path& checkpoint) {
  const TrainerState saved = load_trainer_state(
      checkpoint, {optimizer_.exp_avg(), optimizer_.exp_avg_sq(), model_.flat.span()});
  require_same_trajectory(saved.trajectory, trajectory_json(options_));
  TWELL_REQUIRE(saved.data == data_identity_,
                "cannot resume on other data: the run was trained on tokens '{}', these are '{}'",
                saved.data, data_identity_);
  TWELL_REQUIRE(
      saved.nnz_hint.empty() || static_cast<int64_t>(saved.nnz_hint.size()) == model_.config.layers,
      "{}: the trainer state is of a model with {} layers, not {}", checkpoint.string(),
      saved.nnz_hint.size(), model_.config.layers);
  nnz_hint_ = saved.nnz_hint;
  step_ = saved.step;
}

}  // namespace twell
