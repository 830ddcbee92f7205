// SPDX-License-Identifier: Apache-2.0
// Where the optimizer steps of a run are computed: one device, with the weights, gradients and
// moments that it holds. What a step is asked for and what it gives back are the same on each; the
// schedules, the checkpoints and the order of things are the trainer's (trainer.h).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "twell/model/weights.h"
#include "twell/train/metrics.h"
#include "twell/train/trainer_state.h"

namespace twell {

struct StepRequest {
  int64_t step = 0;  // counted from 1
  double learning_rate = 0.0;
  double l1_coeff = 0.0;
  std::optional<double> relu_share;  // of the activation, while a model is sparsified
  std::span<const LayerHint> hints;  // [L], or empty: nothing is known of the layers
};

struct StepOutcome {
  double ce = 0.0;  // means over the tokens of the step
  double kl = 0.0;
  double grad_norm = 0.0;            // before clipping
  std::vector<LayerMetrics> layers;  // [L]
};

class TrainEngine {
 public:
  virtual ~TrainEngine() = default;

  // The model in host memory; its weights are those of the device within read_state only.
  virtual Model& model() = 0;
  // Forward, backward and the optimizer over all micro-batches of a step. Where the loss or the
  // norm is no finite number, weights and moments stay as they were.
  virtual StepOutcome step(const StepRequest& request) = 0;
  virtual double validate() = 0;  // cross-entropy on the validation split, nats per token

  using StateFn = std::function<void(const OptimizerTensors& state)>;
  // Calls use() with weights and moments as they are now, in host memory...
  virtual void read_state(const StateFn& use) = 0;
  // ...or takes over what fill() writes there.
  virtual void write_state(const StateFn& fill) = 0;

  // For the progress of a run; 0 where it is not known or not limited.
  virtual double peak_flops() const { return 0.0; }   // of dense bf16 products, per second
  virtual int64_t device_bytes() const { return 0; }  // of device memory in use
};

}  // namespace twell
