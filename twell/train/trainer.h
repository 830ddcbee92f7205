// SPDX-License-Identifier: Apache-2.0
// One optimizer step at a time: the schedules' values, computed by an engine, and the measurements.
// Files, checkpoints and the schedule of validation are the run's (run.h).
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "twell/base/context.h"
#include "twell/base/error.h"
#include "twell/data/shards.h"
#include "twell/model/weights.h"
#include "twell/train/engine.h"
#include "twell/train/metrics.h"
#include "twell/train/options.h"

namespace twell {

// The loss or a gradient is not finite; the weights are those before the failed step.
class DivergenceError : public InputError {
 public:
  using InputError::InputError;
};

class Trainer {
 public:
  // Everything given must outlive the trainer; `options` are resolved. `data_identity` names the
  // token stream: a state saved with another one is refused.
  Trainer(Context& ctx, TrainEngine& engine, const ShardSet& shards, const TrainOptions& options,
          std::string data_identity);
  // On the CPU (engine_cpu.h).
  Trainer(Context& ctx, Model& model, const ShardSet& shards, const TrainOptions& options,
          std::string data_identity, const Model* teacher = nullptr);

  int64_t steps_done() const { return step_; }
  bool finished() const { return step_ >= options_.steps; }
  StepMetrics train_step();  // DivergenceError
  double validate() const { return engine_.validate(); }

  // The model and the trainer's own state, into an existing checkpoint folder.
  void save(const std::filesystem::path& checkpoint) const;
  // The trainer's state; the model is loaded from the same checkpoint by the caller.
  void restore(const std::filesystem::path& checkpoint);

 private:
  Trainer(Context& ctx, std::unique_ptr<TrainEngine> owned, const ShardSet& shards,
          const TrainOptions& options, std::string data_identity);
  void measure(const StepOutcome& outcome, double seconds, StepMetrics& metrics);

  Context& ctx_;
  std::unique_ptr<TrainEngine> owned_;
  TrainEngine& engine_;
  TrainOptions options_;
  std::string data_identity_;
  std::vector<LayerHint> hints_;  // [L]
  double flops_per_token_;
  int64_t step_ = 0;
};

}  // namespace twell
