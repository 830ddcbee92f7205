// SPDX-License-Identifier: Apache-2.0
// Training steps on the CPU, in f32. With several ranks, gradients are reduced after the backward
// pass of the last micro-batch. Updated weights are gathered in the order in which the next forward
// pass uses them, while it runs.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "twell/base/buffer.h"
#include "twell/base/context.h"
#include "twell/data/training_data.h"
#include "twell/dist/communicator.h"
#include "twell/model/forward.h"
#include "twell/model/training.h"
#include "twell/train/activity.h"
#include "twell/train/engine.h"
#include "twell/train/micro_batches.h"
#include "twell/train/optimizer.h"
#include "twell/train/options.h"
#include "twell/train/rank_outcome.h"
#include "twell/train/shard_layout.h"

namespace twell {

class TrainEngineCpu : public TrainEngine {
 public:
  // All arguments must outlive the engine; `options` must be resolved. If `teacher` is not null,
  // the model is distilled from it with the share options.distill. ranks: null for a single one.
  TrainEngineCpu(Context& ctx, Model& model, const TrainingData& data, const TrainOptions& options,
                 const Model* teacher = nullptr, Communicator* ranks = nullptr);
  // Other ranks may still be waiting for weights of this one.
  ~TrainEngineCpu() override;

  StepOutcome step(const StepRequest& request) override;
  double validate() override;
  void read_state(const StateFn& use) override;
  void write_state(const StateFn& fill) override;

 private:
  RankShare accumulate_gradients(const StepRequest& request, StepOutcome& outcome);
  double reduce_gradients(StepOutcome& outcome);  // returns their norm
  void ask_teacher(TrainingBatch& batch);
  void start_gathering();
  // Waits for the weights of all layers up to this one; -1: of the embedding, L: of all.
  void await_weights(int64_t layer);
  OptimizerTensors tensors() const {
    return {optimizer_.exp_avg(), optimizer_.exp_avg_sq(), model_.flat.span()};
  }

  Context& ctx_;
  const TrainingData& data_;
  TrainOptions options_;
  MicroBatches micro_batches_;
  TrainingState state_;
  Optimizer optimizer_;
  StepActivity activity_;
  // The calls that gather the weights of each bucket; null once a bucket is complete.
  std::vector<std::unique_ptr<PendingCall>> gathering_;
  Buffer<float> grads_;                    // [N]
  std::vector<int32_t> inputs_, targets_;  // [B * T] of one micro-batch
  std::vector<int64_t> documents_;         // their lengths; empty without a document mask
  const Model* teacher_ = nullptr;
  std::optional<ForwardState> teacher_state_;
  Buffer<float> teacher_hidden_;  // [B * T, D]
};

}  // namespace twell
