// SPDX-License-Identifier: Apache-2.0
// Combines what the ranks of a run measured in a step. Collective; results are the same on all
// ranks.
#pragma once

#include <cstdint>
#include <span>

#include "twell/dist/communicator.h"
#include "twell/train/engine.h"
#include "twell/train/shard_layout.h"

namespace twell {

// A rank's share of a step. Losses are means over targets, of which conversations have fewer than
// tokens; layers' figures are means over micro-batches, which all have equally many tokens.
struct RankShare {
  int64_t micro_batches = 0;
  int64_t targets = 0;
};

// Replaces this rank's means by those over all ranks, and maxima and counts likewise. Dead neurons
// are left out: the caller has combined the flags they are counted from. `culprit` becomes the
// first rank whose loss is not finite.
void combine_outcomes(Communicator& ranks, RankShare share, StepOutcome& outcome);

// The first rank for which `finite` is false; -1: none.
int first_culprit(Communicator& ranks, bool finite);

// Whether all values outside the rank's own pieces are finite. After a reduction these are still
// the rank's own gradients, so that the rank that broke a sum can be named.
bool finite_outside_pieces(std::span<const float> grads, const ShardLayout& layout);

}  // namespace twell
