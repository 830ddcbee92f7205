// SPDX-License-Identifier: Apache-2.0
// Draws the next token from one row of logits.
#pragma once

#include <cstdint>
#include <span>

namespace twell {

struct SamplerOptions {
  float temperature = 1.0f;  // 0: greedy, the lowest id among equals
  int64_t top_k = 0;         // keep the k most likely tokens; 0: all
  float top_p = 1.0f;        // keep the smallest set of most likely tokens with this total mass
  float min_p = 0.0f;        // drop tokens less likely than min_p times the most likely one
  uint64_t seed = 0;

  void validate() const;  // InputError with the value
};

// Filters apply in the order temperature, top-k, top-p, min-p, each to the result of the previous
// one. A pure function of its arguments: `stream` identifies the sequence, `index` the token in it.
// InputError when a logit is NaN or the largest is not finite.
int32_t sample(std::span<const float> logits, const SamplerOptions& options, uint64_t stream,
               uint64_t index);

// Throws the InputError about logits that cannot be sampled.
[[noreturn]] void refuse_logits();

}  // namespace twell
