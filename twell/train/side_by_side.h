// SPDX-License-Identifier: Apache-2.0
// Compares loss and speed of two models on the same held-out tokens, before and after sparsifying.
#pragma once

#include <cstdint>

#include <nlohmann/json_fwd.hpp>

#include "twell/data/training_data.h"
#include "twell/model/scorer.h"
#include "twell/train/micro_batches.h"

namespace twell {

struct ModelFigures {
  double ce = 0.0;                 // nats per token
  double active_per_token = 0.0;   // active neurons, mean over layers
  double active_share = 0.0;       // of all neurons
  double tokens_per_second = 0.0;  // in the layers, median of passes
};

struct SideBySide {
  ModelFigures original;
  ModelFigures sparse;
  int64_t validation_sequences = 0;
  int64_t timed_tokens = 0;  // per pass
};

// The scorers' policy is to be auto, so that each model runs its fastest executions. `options` are
// those of the run's validation; its micro-batch does not matter.
SideBySide compare_side_by_side(Scorer& original, Scorer& sparse, const TrainingData& data,
                                const ValidationOptions& options);
// What such scorers will be given, for planning the memory of a device.
ScorerPlan side_by_side_plan(const ValidationOptions& options);
nlohmann::json side_by_side_json(const SideBySide& figures);

}  // namespace twell
