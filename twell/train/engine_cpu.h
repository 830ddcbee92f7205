// SPDX-License-Identifier: Apache-2.0
// Training steps on the CPU, in f32. With several ranks, gradients are reduced after the backward
// pass of the last micro-batch, and weights gathered after the optimizer's step.
#pragma once

#include <optional>
#include <vector>

#include "twell/base/buffer.h"
#include "twell/base/context.h"
#include "twell/data/shards.h"
#include "twell/dist/communicator.h"
#include "twell/model/forward.h"
#include "twell/model/training.h"
#include "twell/train/activity.h"
#include "twell/train/engine.h"
#include "twell/train/micro_batches.h"
#include "twell/train/optimizer.h"
#include "twell/train/options.h"
#include "twell/train/shard_layout.h"

namespace twell {

class TrainEngineCpu : public TrainEngine {
 public:
  // All arguments must outlive the engine; `options` must be resolved. If `teacher` is not null,
  // the model is distilled from it with the share options.distill. ranks: null for a single one.
  TrainEngineCpu(Context& ctx, Model& model, const ShardSet& shards, const TrainOptions& options,
                 const Model* teacher = nullptr, Communicator* ranks = nullptr);

  Model& model() override { return model_; }
  StepOutcome step(const StepRequest& request) override;
  double validate() override;
  Communicator* ranks() const override { return ranks_; }
  const ShardLayout& layout() const override { return layout_; }
  void read_state(const StateFn& use) override { use(tensors()); }
  void write_state(const StateFn& fill) override { fill(tensors()); }

 private:
  // Returns the number of tokens.
  int64_t accumulate_gradients(const StepRequest& request, StepOutcome& outcome);
  double reduce_gradients(StepOutcome& outcome);  // returns their norm
  void ask_teacher(TrainingBatch& batch);
  OptimizerTensors tensors() const {
    return {optimizer_.exp_avg(), optimizer_.exp_avg_sq(), model_.flat.span()};
  }

  Context& ctx_;
  Model& model_;
  const ShardSet& shards_;
  TrainOptions options_;
  Communicator* ranks_;
  ShardLayout layout_;
  MicroBatches micro_batches_;
  TrainingState state_;
  Optimizer optimizer_;
  StepActivity activity_;
  Buffer<float> grads_;                    // [N]
  std::vector<int32_t> inputs_, targets_;  // [B * T] of one micro-batch
  std::vector<int64_t> documents_;         // their lengths; empty without a document mask
  const Model* teacher_ = nullptr;
  std::optional<ForwardState> teacher_state_;
  Buffer<float> teacher_hidden_;  // [B * T, D]
};

}  // namespace twell
