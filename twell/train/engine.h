// SPDX-License-Identifier: Apache-2.0
// Optimizer steps on one device, which holds weights, gradients and moments. All devices have this
// interface, so that a run can continue on another one. Schedules and checkpoints are the trainer's
// (trainer.h).
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
  std::span<const LayerHint> hints;  // [L], or empty when nothing is known
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

  // The model in host memory. Its weights equal those of the device only within read_state.
  virtual Model& model() = 0;
  // Forward, backward and the optimizer over all micro-batches of a step. When the loss or the norm
  // is not finite, weights and moments stay unchanged.
  virtual StepOutcome step(const StepRequest& request) = 0;
  virtual double validate() = 0;  // cross-entropy on the validation split, nats per token

  using StateFn = std::function<void(const OptimizerTensors& state)>;
  // Calls use() with a host copy of weights and moments.
  virtual void read_state(const StateFn& use) = 0;
  // Takes over the weights and moments that fill() writes.
  virtual void write_state(const StateFn& fill) = 0;

  // For progress messages; 0 when not known or not limited.
  virtual double peak_flops() const { return 0.0; }   // of dense bf16 products, per second
  virtual int64_t device_bytes() const { return 0; }  // of device memory in use
};

}  // namespace twell
