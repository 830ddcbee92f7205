// SPDX-License-Identifier: Apache-2.0
// Compares loss and speed of two models on the same held-out tokens, before and after sparsifying.
#pragma once

#include <cstdint>

#include <nlohmann/json_fwd.hpp>

#include "twell/base/context.h"
#include "twell/data/training_data.h"
#include "twell/model/weights.h"
#include "twell/train/validation.h"

namespace twell {

struct ModelFigures {
  double ce = 0.0;                 // nats per token
  double active_per_token = 0.0;   // active neurons, mean over layers
  double active_share = 0.0;       // of all neurons
  double tokens_per_second = 0.0;  // in the layers alone, median of passes
};

struct SideBySide {
  ModelFigures original;
  ModelFigures sparse;
  int64_t validation_sequences = 0;
  int64_t timed_tokens = 0;  // per pass
};

// Each model runs its fastest executions. `options` are those of the run's validation.
SideBySide compare_side_by_side(Context& ctx, const Model& original, const Model& sparse,
                                const TrainingData& data, const ValidationOptions& options);
nlohmann::json side_by_side_json(const SideBySide& figures);

}  // namespace twell
