// SPDX-License-Identifier: Apache-2.0
// Log-likelihoods of continuations: sum over the continuation's tokens of log p(token | all before
// it), in nats.
#pragma once

#include <span>
#include <vector>

#include "twell/model/scorer.h"
#include "twell/tasks/choice_tokens.h"

namespace twell {

// One batch: every context goes through the model once, its continuations behind it one after the
// other, those of all groups together. Returns a list per group, in the order of its continuations.
// Memory for keys and values: groups.size() sequences as long as the longest group.
std::vector<std::vector<double>> continuation_scores(Scorer& scorer,
                                                     std::span<const ChoiceGroup> groups);

}  // namespace twell
