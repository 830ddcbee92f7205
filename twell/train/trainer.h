// SPDX-License-Identifier: Apache-2.0
// One optimizer step at a time: micro-batches forward and backward, clipping, AdamW, dead neurons.
// Files, checkpoints and the schedule of validation are the run's (run.h).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "twell/base/buffer.h"
#include "twell/base/context.h"
#include "twell/base/error.h"
#include "twell/data/batch_sampler.h"
#include "twell/data/shards.h"
#include "twell/model/forward.h"
#include "twell/model/training.h"
#include "twell/model/weights.h"
#include "twell/train/activity.h"
#include "twell/train/metrics.h"
#include "twell/train/optimizer.h"
#include "twell/train/options.h"

namespace twell {

// The loss or a gradient is no longer a number; the weights are those before the failed step.
class DivergenceError : public InputError {
 public:
  using InputError::InputError;
};

class Trainer {
 public:
  // Everything given must outlive the trainer; `options` are resolved. `data_identity` names the
  // token stream: a state saved with another one is refused. `teacher`, when not null, is what the
  // model is distilled against, with the share that the options name.
  Trainer(Context& ctx, Model& model, const ShardSet& shards, const TrainOptions& options,
          std::string data_identity, const Model* teacher = nullptr);

  int64_t steps_done() const { return step_; }
  bool finished() const { return step_ >= options_.steps; }
  StepMetrics train_step();  // DivergenceError
  double validate() const;   // cross-entropy on the validation split

  // The model and the trainer's own state, into an existing checkpoint folder.
  void save(const std::filesystem::path& checkpoint) const;
  // The trainer's state; the model is loaded from the same checkpoint by the caller.
  void restore(const std::filesystem::path& checkpoint);

 private:
  struct StepLoss {
    double ce = 0.0;  // means over the tokens of the step
    double kl = 0.0;
  };
  void read_micro_batch(int64_t micro_batch);
  StepLoss accumulate_gradients(const StepMetrics& metrics);
  void ask_teacher(TrainingBatch& batch);

  Context& ctx_;
  Model& model_;
  const ShardSet& shards_;
  TrainOptions options_;
  std::string data_identity_;
  BatchSampler sampler_;
  TrainingState state_;
  Optimizer optimizer_;
  StepActivity activity_;
  Buffer<float> grads_;                    // [N]
  std::vector<int32_t> inputs_, targets_;  // [B * T] of one micro-batch
  std::vector<double> nnz_hint_;           // [L]
  const Model* teacher_ = nullptr;
  std::optional<ForwardState> teacher_state_;
  Buffer<float> teacher_hidden_;  // [B * T, D]
  int64_t step_ = 0;
};

}  // namespace twell
