// SPDX-License-Identifier: Apache-2.0
#include "twell/train/engine_cuda.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "twell/base/buffer.h"
#include "twell/base/profile_range.h"
#include "twell/model/model_cuda.h"
#include "twell/ops/adamw/adamw.h"
#include "twell/train/activity.h"
#include "twell/train/rank_outcome.h"

namespace twell {
namespace {

const ModelConfig& supported(const ModelConfig& config, const TrainOptions& options) {
  const std::string why = cuda_run_unsupported(config, options);
  TWELL_REQUIRE(why.empty(), "{}", why);
  return config;
}

// Values that change in every step and are copied to the device.
struct StepValues {
  OptimizerCuda::Coefficients optimizer{};
  float l1_scale = 0.0f;
  float relu_share = 0.0f;
  float ce_scale = 0.0f;  // tokens of the step / those with a target
};

// A block of page-locked memory and its copy on the device.
class Mirrored {
 public:
  explicit Mirrored(int64_t bytes) : device_(bytes), host_(bytes) {}

  std::byte* host() const { return host_.data(); }
  std::byte* device() const { return device_.data(); }
  size_t bytes() const { return static_cast<size_t>(device_.bytes()); }
  void to_device(cudaStream_t stream) const {
    TWELL_CUDA_CHECK(cudaMemcpyAsync(device(), host(), bytes(), cudaMemcpyHostToDevice, stream));
  }
  void to_host(cudaStream_t stream) const {
    TWELL_CUDA_CHECK(cudaMemcpyAsync(host(), device(), bytes(), cudaMemcpyDeviceToHost, stream));
  }

 private:
  DeviceBuffer<std::byte> device_;
  PinnedBuffer<std::byte> host_;
};

}  // namespace

// Cleared at the start of a step, copied back at its end.
struct TrainEngineCuda::Report {
  struct Head {
    CrossEntropySum loss;
    GradientNorm norm;
  };
  explicit Report(const ModelConfig& config)
      : layers(config.layers),
        ffn(config.ffn),
        counts_at(static_cast<int64_t>(sizeof(Head))),
        active_at(counts_at + layers * static_cast<int64_t>(sizeof(FfnTrainCountsCuda))),
        block(active_at + layers * ffn),
        values(static_cast<int64_t>(sizeof(StepValues))) {}

  static Head* head(std::byte* base) { return reinterpret_cast<Head*>(base); }
  FfnTrainCountsCuda* counts(std::byte* base) const {
    return reinterpret_cast<FfnTrainCountsCuda*>(base + counts_at);
  }
  uint8_t* active(std::byte* base) const { return reinterpret_cast<uint8_t*>(base + active_at); }
  const StepValues* device_values() const {
    return reinterpret_cast<const StepValues*>(values.device());
  }

  int64_t layers, ffn;
  int64_t counts_at, active_at;
  Mirrored block;
  Mirrored values;
};

// Replays micro-batches as a CUDA graph from the second on. The first is enqueued op by op, because
// it plans matrix products, which allocates memory.
class TrainEngineCuda::Replay {
 public:
  explicit Replay(CudaContext& ctx) : ctx_(ctx) {}
  // Call it when executions have changed.
  void clear() {
    graph_ = CudaGraph();
    ran_ = false;
  }
  template <typename Enqueue>
  void run(const Enqueue& enqueue) {
    if (!ran_) {
      enqueue();
      ran_ = true;
      return;
    }
    if (!graph_.captured()) graph_ = CudaGraph(ctx_.stream(), enqueue);
    graph_.launch(ctx_.stream());
    ++replayed_;
  }
  int64_t replayed() const { return replayed_; }

 private:
  CudaContext& ctx_;
  CudaGraph graph_;
  bool ran_ = false;
  int64_t replayed_ = 0;
};

TrainEngineCuda::TrainEngineCuda(CudaContext& ctx, Model& model, const TrainingData* data,
                                 const TrainOptions& options, std::span<const LayerHint> hints,
                                 Communicator* ranks, const Model* teacher)
    : TrainEngine(model, ranks),
      ctx_(ctx),
      options_(options),
      free_at_start_(free_device_bytes()),
      training_(ctx, supported(model.config, options),
                training_plan(ctx, model.config, options, hints),
                OptimizerCuda::bytes_needed(model.config, options) +
                    teacher_bytes(ctx, model.config, options)),
      nccl_(ranks == nullptr ? nullptr : std::make_unique<NcclCommunicator>(*ranks)),
      optimizer_(ctx, model, options, layout_, nccl_.get()),
      report_(std::make_unique<Report>(model.config)),
      replays_{std::make_unique<Replay>(ctx), std::make_unique<Replay>(ctx)},
      inputs_(static_cast<size_t>(options.micro_batch_tokens())),
      targets_(static_cast<size_t>(options.micro_batch_tokens())) {
  if (data != nullptr) {
    micro_batches_ = std::make_unique<MicroBatches>(*data, options);
    if (options.validate_every > 0) {
      validation_ = std::make_unique<ValidationWindows>(
          *data, ValidationOptions{.sequences = options.validation_sequences,
                                   .length = options.sequence_length,
                                   .document_mask = options.document_mask});
    }
  }
  TWELL_CHECK((teacher != nullptr) == (options.distill > 0.0), "a distillation share of {} {}",
              options.distill, teacher == nullptr ? "without a teacher" : "with a teacher");
  if (teacher != nullptr) {
    TWELL_CHECK(teacher->config.vocab_size == model.config.vocab_size,
                "a teacher of {} tokens for a model of {}", teacher->config.vocab_size,
                model.config.vocab_size);
    teacher_ = std::make_unique<TeacherForwardCuda>(
        ctx, *teacher, MicroBatchShape{options.micro_batch, options.sequence_length});
    pass_.teacher = teacher_->of_share(options.distill);
  }
  std::byte* const block = report_->block.device();
  pass_.weights = optimizer_.weights();
  pass_.grad_scale = 1.0f / static_cast<float>(options.batch_tokens);
  pass_.l1_scale = &report_->device_values()->l1_scale;
  pass_.ce_scale = &report_->device_values()->ce_scale;
  pass_.grads = optimizer_.grads();
  pass_.loss = &Report::head(block)->loss;
  pass_.counts = report_->counts(block);
  pass_.active = report_->active(block);
  device_bytes_ = free_at_start_ - free_device_bytes();
}

TrainEngineCuda::~TrainEngineCuda() { cudaStreamSynchronize(ctx_.stream()); }

void TrainEngineCuda::set_batch(std::vector<int32_t> inputs, std::vector<int32_t> targets,
                                std::vector<int64_t> documents) {
  inputs_ = std::move(inputs);
  targets_ = std::move(targets);
  documents_ = std::move(documents);
  fixed_batch_ = true;
}

void TrainEngineCuda::set_hooks(Hooks hooks) {
  hooks_ = std::move(hooks);
  pass_.after_stage = hooks_.after_stage;
  pass_.before_ffn = hooks_.before_ffn;
  for (const auto& replay : replays_) replay->clear();
}

int64_t TrainEngineCuda::replayed() const {
  return replays_[0]->replayed() + replays_[1]->replayed();
}

void TrainEngineCuda::prepare(const StepRequest& request) {
  const bool blends = request.relu_share && *request.relu_share < 1.0;
  ModelConfig config = model_.config;
  if (blends) config.activation = options_.relufy_from;
  const bool other_activation = blends != pass_.activation.has_value();
  pass_.activation = blends ? std::optional(config.activation) : std::nullopt;
  pass_.relu_share = blends ? &report_->device_values()->relu_share : nullptr;
  const bool changed =
      training_.prepare(expected_executions(ctx_, config, options_, request.hints)) ||
      other_activation || !prepared_;
  if (changed) {
    for (const auto& replay : replays_) replay->clear();
  }
  prepared_ = true;
  memory_changed_ = changed;
}

// Reads a micro-batch into inputs_ and targets_, unless they hold it already.
void TrainEngineCuda::next_batch(int64_t step, int64_t index) {
  if (fixed_batch_ || (read_step_ == step && read_index_ == index)) return;
  TWELL_CHECK(micro_batches_ != nullptr, "step {} has no micro-batches to read", step);
  micro_batches_->read(step, index, inputs_, targets_, documents_);
  read_step_ = step;
  read_index_ = index;
}

int64_t TrainEngineCuda::own_micro_batches() const {
  return (options_.micro_batches() - layout_.rank() + layout_.ranks() - 1) / layout_.ranks();
}

// The first micro-batch of a step overwrites the gradients; later ones add to them.
void TrainEngineCuda::enqueue_micro_batch(bool first, bool last) {
  pass_.add = !first;
  const bool reduces = last && nccl_ != nullptr;
  // The first pass with new executions allocates, which may wait for kernels of the other ranks if
  // it communicates.
  const bool beside = nccl_ != nullptr && (first || last) && !memory_changed_;
  pass_.before_layer = pass_.after_backward = nullptr;
  if (beside && first) {
    pass_.before_layer = [this](int64_t layer) { optimizer_.await_weights(layer); };
  } else {
    optimizer_.await_weights(model_.config.layers);
  }
  if (beside && last) {
    pass_.after_backward = [this](int64_t layer) { optimizer_.reduce_after(layer); };
  }
  const auto enqueue = [&] { training_.forward_backward(pass_); };
  if (hooks_.before_pass) hooks_.before_pass();
  if (pass_.after_stage || beside) {
    enqueue();
  } else {
    replays_[first ? 0 : 1]->run(enqueue);
  }
  if (!reduces || beside) return;
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
  for (int64_t layer = model_.config.layers; layer >= -1; --layer) optimizer_.reduce_after(layer);
}

StepOutcome TrainEngineCuda::step(const StepRequest& request) {
  prepare(request);
  AdamW adamw;
  adamw.learning_rate = request.learning_rate;
  adamw.beta1 = options_.beta1;
  adamw.beta2 = options_.beta2;
  adamw.eps = options_.eps;
  adamw.weight_decay = options_.weight_decay;
  adamw.step = request.step;
  StepValues values;
  values.optimizer.adamw = adamw_coefficients(adamw);
  values.optimizer.muon =
      muon_coefficients({.learning_rate = matrix_learning_rate_at(options_, request.step - 1),
                         .momentum = options_.momentum,
                         .weight_decay = options_.weight_decay});
  values.l1_scale =
      static_cast<float>(request.l1_coeff) /
      (static_cast<float>(model_.config.layers) * static_cast<float>(options_.batch_tokens));
  values.relu_share = static_cast<float>(request.relu_share.value_or(1.0));
  const int64_t targets =
      fixed_batch_ ? options_.batch_tokens : micro_batches_->step_targets(request.step);
  values.ce_scale = static_cast<float>(options_.batch_tokens) / static_cast<float>(targets);
  std::memcpy(report_->values.host(), &values, sizeof(values));
  report_->values.to_device(ctx_.stream());
  const Mirrored& block = report_->block;
  TWELL_CUDA_CHECK(cudaMemsetAsync(block.device(), 0, block.bytes(), ctx_.stream()));
  const int64_t count = own_micro_batches();
  for (int64_t i = 0; i < count; ++i) {
    next_batch(request.step, layout_.rank() + i * layout_.ranks());
    if (teacher_ != nullptr) teacher_->run(inputs_, documents_);
    training_.stage(inputs_, targets_, documents_);
    enqueue_micro_batch(/*first=*/i == 0, /*last=*/i == count - 1);
  }
  if (nccl_ != nullptr) optimizer_.merge_active(pass_.active, report_->layers * report_->ffn);
  {
    const ProfileRange range("optimizer");
    GradientNorm* const norm = &Report::head(block.device())->norm;
    optimizer_.step(&report_->device_values()->optimizer, norm);
    if (options_.reinit_dead) optimizer_.reinit_dead(request.step, pass_.active, norm);
    optimizer_.gather_weights();
  }
  if (hooks_.after_optimizer) hooks_.after_optimizer();
  block.to_host(ctx_.stream());
  if (request.step < options_.steps) next_batch(request.step + 1, layout_.rank());
  optimizer_.wait();
  // The first pass with new executions allocates workspaces.
  if (std::exchange(memory_changed_, false)) device_bytes_ = free_at_start_ - free_device_bytes();
  return outcome();
}

StepOutcome TrainEngineCuda::outcome() {
  std::byte* const block = report_->block.host();
  const Report::Head& head = *Report::head(block);
  StepOutcome outcome;
  outcome.ce = head.loss.loss_sum / static_cast<double>(std::max<int64_t>(head.loss.tokens, 1));
  outcome.kl = head.loss.kl_sum / static_cast<double>(std::max<int64_t>(head.loss.tokens, 1));
  outcome.grad_norm = head.norm.norm;
  constexpr int64_t kTile = 128;  // tokens; a micro-batch's last tile may have fewer
  const double tiles = static_cast<double>(own_micro_batches() *
                                           ((options_.micro_batch_tokens() + kTile - 1) / kTile));
  for (int64_t i = 0; i < report_->layers; ++i) {
    const FfnTrainCountsCuda& counts = report_->counts(block)[i];
    const uint8_t* const active = report_->active(block) + i * report_->ffn;
    const double tokens = static_cast<double>(std::max<unsigned long long>(counts.tokens, 1));
    LayerMetrics& layer = outcome.layers.emplace_back();
    layer.nnz = static_cast<double>(counts.nnz) / tokens;
    layer.max_nnz = counts.max_row_nnz;
    layer.recomputed = counts.recomputed;
    layer.union_neurons = static_cast<double>(counts.union_neurons) / tiles;
    layer.l1 = counts.l1_sum / tokens;
    layer.dead = std::count(active, active + report_->ffn, uint8_t{0});
    layer.dead_share = static_cast<double>(layer.dead) / static_cast<double>(report_->ffn);
    layer.execution = training_.execution(i);
  }
  if (ranks_ == nullptr) return outcome;
  combine_outcomes(*ranks_, {own_micro_batches(), head.loss.tokens}, outcome);
  if (!std::isfinite(outcome.grad_norm) && outcome.culprit < 0) {
    std::vector<float> grads(static_cast<size_t>(layout_.parameters()));
    TWELL_CUDA_CHECK(cudaMemcpyAsync(grads.data(), optimizer_.grads(), grads.size() * sizeof(float),
                                     cudaMemcpyDeviceToHost, ctx_.stream()));
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
    outcome.culprit = first_culprit(*ranks_, finite_outside_pieces(grads, layout_));
  }
  return outcome;
}

double TrainEngineCuda::validate() {
  TWELL_CHECK(validation_ != nullptr, "a run without validation has no windows for it");
  const int64_t sequences = validation_->sequences(), most = options_.micro_batch;
  const auto length = static_cast<size_t>(options_.sequence_length);
  optimizer_.await_weights(model_.config.layers);
  CrossEntropySum* const loss = &Report::head(report_->block.device())->loss;
  TWELL_CUDA_CHECK(cudaMemsetAsync(loss, 0, sizeof(*loss), ctx_.stream()));
  std::vector<int32_t> inputs(inputs_.size()), targets(targets_.size());
  std::vector<int64_t> documents;
  for (int64_t begin = layout_.rank() * most; begin < sequences; begin += layout_.ranks() * most) {
    const int64_t count = std::min(most, sequences - begin);
    const size_t read = static_cast<size_t>(count) * length;
    // Unused sequences of the last micro-batch have no targets.
    std::fill(inputs.begin(), inputs.end(), 0);
    std::fill(targets.begin(), targets.end(), -1);
    validation_->read(begin, count, std::span(inputs).first(read), std::span(targets).first(read),
                      documents);
    if (options_.document_mask) {
      documents.insert(documents.end(), static_cast<size_t>(most - count),
                       options_.sequence_length);
    }
    training_.stage(inputs, targets, documents);
    training_.evaluate(pass_);
  }
  CrossEntropySum sum;
  TWELL_CUDA_CHECK(cudaMemcpyAsync(&sum, loss, sizeof(sum), cudaMemcpyDeviceToHost, ctx_.stream()));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
  double sums[] = {sum.loss_sum, static_cast<double>(sum.tokens)};
  if (ranks_ != nullptr) ranks_->all_reduce_sum(sums);
  TWELL_CHECK(sums[1] > 0, "no validation tokens in {} sequences", sequences);
  return sums[0] / sums[1];
}

void TrainEngineCuda::read_state(const StateFn& use) {
  const Buffer<float> exp_avg(layout_.size()), exp_avg_sq(layout_.size());
  const OptimizerTensors state{exp_avg.span(), exp_avg_sq.span(), model_.flat.span()};
  optimizer_.download(state);
  use(state);
}

void TrainEngineCuda::write_state(const StateFn& fill) {
  const Buffer<float> exp_avg(layout_.size()), exp_avg_sq(layout_.size());
  const OptimizerTensors state{exp_avg.span(), exp_avg_sq.span(), model_.flat.span()};
  fill(state);
  optimizer_.upload(state);
}

}  // namespace twell
