// SPDX-License-Identifier: Apache-2.0
// Cross-entropy of a model on the validation split.
#pragma once

#include <cstdint>

#include "twell/data/training_data.h"
#include "twell/dist/communicator.h"
#include "twell/model/scorer.h"
#include "twell/train/micro_batches.h"

namespace twell {

// Mean in nats per token, over batches of options.micro_batch sequences. Ranks share the sequences
// and have the same result.
double validation_cross_entropy(Scorer& scorer, const TrainingData& data,
                                const ValidationOptions& options, Communicator* ranks = nullptr);

}  // namespace twell
