// SPDX-License-Identifier: Apache-2.0
// Log-likelihoods of continuations: the sum over the continuation's tokens of log p(token | all
// tokens before it), in nats.
#pragma once

#include <span>
#include <vector>

#include "twell/model/scorer.h"
#include "twell/tasks/choice_tokens.h"

namespace twell {

// Scores one batch. The model runs once on all contexts, then on the first continuation of every
// group at once, then the second, and so on. Returns a list per group, in the order of its
// continuations. The KV cache holds groups.size() sequences as long as the longest group.
std::vector<std::vector<double>> continuation_scores(Scorer& scorer,
                                                     std::span<const ChoiceGroup> groups);

}  // namespace twell
