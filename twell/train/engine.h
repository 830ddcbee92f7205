// SPDX-License-Identifier: Apache-2.0
// Runs optimizer steps on one device, which holds weights, gradients and moments, together with the
// engines of the other ranks if there are several. All devices share
// this interface, so that a run can continue on another device. Schedules and checkpoints belong to
// the trainer (trainer.h).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "twell/model/weights.h"
#include "twell/train/metrics.h"
#include "twell/train/shard_layout.h"
#include "twell/train/trainer_state.h"

namespace twell {

struct StepRequest {
  int64_t step = 0;  // counted from 1
  double learning_rate = 0.0;
  double l1_coeff = 0.0;
  std::optional<double> relu_share;  // of ReLU in the activation, during sparsification
  std::span<const LayerHint> hints;  // [L]; empty when unknown
};

// Over all ranks.
struct StepOutcome {
  double ce = 0.0;  // means over the tokens of the step
  double kl = 0.0;
  double grad_norm = 0.0;  // before clipping
  int culprit = -1;        // the rank whose loss or gradients are not finite; -1: not known
  std::vector<LayerMetrics> layers;  // [L]
};

class TrainEngine {
 public:
  virtual ~TrainEngine() = default;

  // The model in host memory. Its weights are up to date only within read_state.
  Model& model() { return model_; }
  // Runs forward, backward and the optimizer for all micro-batches of a step, of which each rank
  // takes its share. When the loss or the norm is not finite, weights and moments stay unchanged.
  // This and the functions below are collective: all ranks call them.
  virtual StepOutcome step(const StepRequest& request) = 0;
  virtual double validate() = 0;  // nats per token on the validation split

  // The other ranks; null for a run of a single one.
  Communicator* ranks() const { return ranks_; }
  const ShardLayout& layout() const { return layout_; }

  using StateFn = std::function<void(const OptimizerTensors& state)>;
  // Calls use() with a host copy of the weights and moments.
  virtual void read_state(const StateFn& use) = 0;
  // Replaces the weights and moments by those that fill() writes.
  virtual void write_state(const StateFn& fill) = 0;

  // Whether cross-entropy, a step's and validation's, comes from logits rounded to bf16.
  virtual bool rounds_logits() const { return false; }

  // For progress messages; 0 when unknown or unlimited.
  virtual double peak_flops() const { return 0.0; }   // dense bf16, FLOP/s
  virtual int64_t device_bytes() const { return 0; }  // in use

 protected:
  TrainEngine(Model& model, Communicator* ranks)
      : model_(model),
        ranks_(ranks),
        layout_(model, ranks == nullptr ? 1 : ranks->size(), ranks == nullptr ? 0 : ranks->rank()) {
  }

  Model& model_;
  Communicator* ranks_;
  ShardLayout layout_;
};

}  // namespace twell
