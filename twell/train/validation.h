// SPDX-License-Identifier: Apache-2.0
// Cross-entropy of a model on the validation split.
#pragma once

#include <cstdint>

#include "twell/base/context.h"
#include "twell/data/shards.h"
#include "twell/model/weights.h"

namespace twell {

struct ValidationOptions {
  int64_t sequences = 0;  // at most; fewer than the split has are spread evenly over it
  int64_t length = 0;     // tokens of a sequence
  int64_t micro_batch = 1;
};

// Mean in nats per token.
double validation_cross_entropy(Context& ctx, const Model& model, const ShardSet& shards,
                                const ValidationOptions& options);

}  // namespace twell
