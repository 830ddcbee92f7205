// SPDX-License-Identifier: Apache-2.0
// Runs one optimizer step at a time: evaluates the schedules, calls the engine, and collects
// measurements. The run (run.h) handles files, checkpoints and the times of validation.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "twell/base/context.h"
#include "twell/base/error.h"
#include "twell/data/training_data.h"
#include "twell/model/weights.h"
#include "twell/train/engine.h"
#include "twell/train/metrics.h"
#include "twell/train/options.h"

namespace twell {

// The loss or a gradient is not finite. The weights are those before the failed step.
class DivergenceError : public InputError {
 public:
  using InputError::InputError;
};

class Trainer {
 public:
  using Clock = std::chrono::steady_clock;

  // All arguments must outlive the trainer; `options` must be resolved. `data_identity` identifies
  // the token stream: restore() refuses a state saved with another one.
  Trainer(Context& ctx, TrainEngine& engine, const TrainingData& data, const TrainOptions& options,
          std::string data_identity);

  int64_t steps_done() const { return step_; }
  bool finished() const { return step_ >= options_.steps; }
  // DivergenceError. `start`: when the step's work began, if that was before the call.
  StepMetrics train_step(Clock::time_point start = Clock::now());
  double validate() const { return engine_.validate(); }

  // Saves the model (rank 0) and the trainer's state (each rank its shard) into an existing
  // checkpoint folder. Collective.
  void save(const std::filesystem::path& checkpoint) const;
  // Restores the trainer's state; the caller loads the model from the same checkpoint.
  void restore(const std::filesystem::path& checkpoint);

 private:
  void measure(const StepOutcome& outcome, double seconds, StepMetrics& metrics);

  Context& ctx_;
  TrainEngine& engine_;
  TrainOptions options_;
  std::string data_identity_;
  std::vector<LayerHint> hints_;  // [L]
  double flops_per_token_;
  int64_t step_ = 0;
};

}  // namespace twell
