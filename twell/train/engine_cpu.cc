// SPDX-License-Identifier: Apache-2.0
#include "twell/train/engine_cpu.h"

#include <algorithm>
#include <cmath>
#include <exception>

#include "twell/base/error.h"
#include "twell/model/scorer_cpu.h"
#include "twell/ops/adamw/adamw.h"
#include "twell/train/validation.h"

namespace twell {
namespace {

// Number of tokens in a micro-batch, the size of the id buffers.
size_t batch_size(const TrainOptions& options) {
  return static_cast<size_t>(options.micro_batch_tokens());
}

std::span<float> bucket_of(std::span<float> flat, const GradientBucket& bucket) {
  return flat.subspan(static_cast<size_t>(bucket.begin),
                      static_cast<size_t>(bucket.end - bucket.begin));
}

}  // namespace

TrainEngineCpu::TrainEngineCpu(Context& ctx, Model& model, const TrainingData& data,
                               const TrainOptions& options, const Model* teacher,
                               Communicator* ranks)
    : TrainEngine(model, ranks),
      ctx_(ctx),
      data_(data),
      options_(options),
      micro_batches_(data, options),
      state_(model.config, {options.micro_batch, options.sequence_length}),
      optimizer_(model, layout_, options.optimizer, ranks),
      activity_(model.config),
      gathering_(layout_.buckets().size()),
      grads_(model.flat.size()),
      inputs_(batch_size(options)),
      targets_(batch_size(options)),
      teacher_(teacher) {
  TWELL_CHECK((teacher != nullptr) == (options.distill > 0.0), "a distillation share of {} {}",
              options.distill, teacher == nullptr ? "without a teacher" : "with a teacher");
  TWELL_REQUIRE(options.gradient_dtype == DType::kF32,
                "the CPU adds gradients in f32; leave --gradient-dtype out");
  set_matmul_compute(ctx, options.compute);
  if (teacher != nullptr) {
    TWELL_CHECK(teacher->config.vocab_size == model.config.vocab_size,
                "a teacher of {} tokens for a model of {}", teacher->config.vocab_size,
                model.config.vocab_size);
    teacher_state_.emplace(teacher->config, FfnPolicy::kAuto);
    teacher_hidden_ = Buffer<float>(options.micro_batch_tokens() * teacher->config.width);
  }
  // One reservation; otherwise the ops of the first step would allocate blocks of growing size.
  ctx.scratch().reserve(static_cast<size_t>(
      TrainingState::scratch_bytes(model.config, {options.micro_batch, options.sequence_length})));
}

TrainEngineCpu::~TrainEngineCpu() {
  if (std::uncaught_exceptions() > 0) return;
  try {
    await_weights(model_.config.layers);
  } catch (const RankFault&) {  // whoever makes the next call learns of it
  }
}

void TrainEngineCpu::start_gathering() {
  if (ranks_ == nullptr) return;
  // The order of buckets is that of the layers.
  for (size_t i = 0; i < gathering_.size(); ++i) {
    gathering_[i] = ranks_->start_all_gather(bucket_of(model_.flat.span(), layout_.buckets()[i]));
  }
}

void TrainEngineCpu::await_weights(int64_t layer) {
  // The first weights of a layer may lie in the bucket before.
  for (size_t i = 0; i < gathering_.size(); ++i) {
    if (gathering_[i] == nullptr || layout_.buckets()[i].layer > layer) continue;
    gathering_[i]->wait();
    gathering_[i] = nullptr;
  }
}

void TrainEngineCpu::read_state(const StateFn& use) {
  await_weights(model_.config.layers);
  use(tensors());
}

void TrainEngineCpu::write_state(const StateFn& fill) {
  await_weights(model_.config.layers);
  fill(tensors());
}

void TrainEngineCpu::ask_teacher(TrainingBatch& batch) {
  const MatrixF hidden =
      teacher_hidden_.matrix(options_.micro_batch_tokens(), teacher_->config.width);
  std::vector<ForwardSequence> sequences(static_cast<size_t>(options_.micro_batch),
                                         {.tokens = options_.sequence_length});
  if (!documents_.empty()) {
    sequences.clear();
    for (const int64_t length : documents_) sequences.push_back({.tokens = length});
  }
  forward(ctx_, *teacher_, *teacher_state_,
          {.ids = inputs_, .sequences = sequences, .hidden = hidden});
  batch.teacher_hidden = hidden;
  batch.teacher_head = teacher_->weights.head;
  batch.teacher_share = static_cast<float>(options_.distill);
}

RankShare TrainEngineCpu::accumulate_gradients(const StepRequest& request, StepOutcome& outcome) {
  ctx_.parallel_for(grads_.size(), 1 << 16, [&](int64_t begin, int64_t end, int) {
    std::fill(grads_.data() + begin, grads_.data() + end, 0.0f);
  });
  activity_.clear();
  const int64_t step_targets = micro_batches_.step_targets(request.step);
  RankShare share;
  for (int64_t i = layout_.rank(); i < options_.micro_batches(); i += layout_.ranks()) {
    micro_batches_.read(request.step, i, inputs_, targets_, documents_);
    TrainingBatch batch;
    batch.inputs = inputs_;
    batch.targets = targets_;
    batch.documents = documents_;
    batch.step_tokens = options_.batch_tokens;
    batch.step_targets = step_targets;
    batch.l1_coeff = static_cast<float>(request.l1_coeff);
    if (request.relu_share) {
      batch.activation = {options_.relufy_from, static_cast<float>(*request.relu_share)};
    }
    if (teacher_ != nullptr) ask_teacher(batch);
    batch.policy = options_.ffn_policy;
    for (const LayerHint& hint : request.hints) batch.nnz_hint.push_back(hint.nnz);
    batch.active = &activity_.active();
    batch.before_layer = [this](int64_t layer) { await_weights(layer); };
    const TrainingResult result = forward_backward(ctx_, model_, batch, state_, grads_.span());
    activity_.add(result.layers);
    outcome.ce += result.loss_sum;
    outcome.kl += result.kl_sum;
    share.targets += result.loss_tokens;
    ++share.micro_batches;
  }
  const double count = static_cast<double>(std::max<int64_t>(share.targets, 1));
  outcome.ce /= count;
  outcome.kl /= count;
  return share;
}

double TrainEngineCpu::reduce_gradients(StepOutcome& outcome) {
  if (ranks_ == nullptr) return global_norm(ctx_, grads_.span());
  double squares = 0.0;  // of this rank's pieces
  for (size_t i = 0; i < layout_.buckets().size(); ++i) {
    ranks_->reduce_scatter_sum(bucket_of(grads_.span(), layout_.buckets()[i]));
    const ShardPiece& piece = layout_.pieces()[i];
    const double norm = global_norm(ctx_, grads_.span().subspan(static_cast<size_t>(piece.begin),
                                                                static_cast<size_t>(piece.size)));
    squares += norm * norm;
  }
  ranks_->all_reduce_sum(std::span(&squares, 1));
  if (!std::isfinite(squares) && outcome.culprit < 0) {
    outcome.culprit = first_culprit(*ranks_, finite_outside_pieces(grads_.span(), layout_));
  }
  return std::sqrt(squares);
}

StepOutcome TrainEngineCpu::step(const StepRequest& request) {
  StepOutcome outcome;
  const RankShare share = accumulate_gradients(request, outcome);
  if (ranks_ != nullptr) activity_.merge_active(*ranks_);
  outcome.layers = activity_.metrics();
  if (ranks_ != nullptr) combine_outcomes(*ranks_, share, outcome);
  outcome.grad_norm = reduce_gradients(outcome);
  if (!std::isfinite(outcome.ce) || !std::isfinite(outcome.grad_norm)) return outcome;
  optimizer_.step(ctx_, options_, request.step, outcome.grad_norm, grads_.span(), model_);
  if (options_.reinit_dead) {
    reinit_dead_neurons(ctx_, options_, request.step, activity_.active(), layout_.pieces(), model_);
  }
  start_gathering();
  return outcome;
}

double TrainEngineCpu::validate() {
  await_weights(model_.config.layers);
  // Validates half a training micro-batch at a time, which fits into the scratch memory of
  // training.
  ScorerCpu scorer(ctx_, model_);
  return validation_cross_entropy(scorer, data_,
                                  {.sequences = options_.validation_sequences,
                                   .length = options_.sequence_length,
                                   .micro_batch = std::max<int64_t>(1, options_.micro_batch / 2),
                                   .document_mask = options_.document_mask},
                                  ranks_);
}

}  // namespace twell
