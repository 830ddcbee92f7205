// SPDX-License-Identifier: Apache-2.0
// Log-probabilities of tokens under one row of logits: natural logarithms, at temperature 1,
// without the sampler's filters.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace twell {

struct TokenLogProb {
  int32_t id = -1;
  float log_prob = 0.0f;
};

struct TokenLogProbs {
  TokenLogProb token;
  std::vector<TokenLogProb> top;  // the most likely tokens, most likely first, equals by id
};

// logits [V]: the probabilities of all of them add up to 1. top: the number of most likely tokens
// wanted, among the first `vocab`; fewer if there are fewer. Error when `id` has no logit.
TokenLogProbs token_log_probs(std::span<const float> logits, int32_t id, int64_t top,
                              int64_t vocab);

}  // namespace twell
