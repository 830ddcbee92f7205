// SPDX-License-Identifier: Apache-2.0
// Draws the next token from one row of logits.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "twell/base/context.h"
#include "twell/base/host_device.h"

namespace twell {

// Stands for a token that cannot be drawn, because a logit is NaN or the largest is not finite.
inline constexpr int32_t kNoToken = -1;
inline constexpr std::string_view kNoTokenReason =
    "the model's output is NaN or infinite, so that no token can be drawn: its weights are "
    "damaged, "
    "or its activations too large";
inline constexpr std::string_view kNoneFitsReason =
    "no token of the vocabulary continues the text by its grammar";

struct SamplerOptions {
  float temperature = 1.0f;  // 0: greedy, the lowest id among equals
  int64_t top_k = 0;         // keep the k most likely tokens; 0: all
  float top_p = 1.0f;        // keep the smallest set of most likely tokens with this total mass
  float min_p = 0.0f;        // drop tokens less likely than min_p times the most likely one
  // Positive logits of tokens of the prompt and of the new text are divided by this, others
  // multiplied.
  float repetition_penalty = 1.0f;
  float frequency_penalty = 0.0f;  // taken from a token's logit for each time it is in the new text
  float presence_penalty = 0.0f;   // taken once from the logits of tokens in the new text
  uint64_t seed = 0;

  void validate() const;  // InputError with the value
  bool penalizes() const {
    return repetition_penalty != 1.0f || frequency_penalty != 0.0f || presence_penalty != 0.0f;
  }
};

// A token of the prompt or of the new text, or one that the request favours or avoids.
struct SeenToken {
  static constexpr int32_t kNowhere = -1;
  int32_t id = 0;
  int32_t times = 0;  // in the new text; kNowhere: neither there nor in the prompt
  float bias = 0.0f;  // is added to the logit, behind penalties
};

// A wish of a request: SeenToken::bias of a token, from -kMostBias to kMostBias.
struct TokenBias {
  int32_t id = 0;
  float bias = 0.0f;
};
inline constexpr float kMostBias = 100.0f;
inline constexpr int64_t kMostBiases = 1024;  // of a request

// The token's logit after penalties and bias, the same to the bit on all devices.
TWELL_HOST_DEVICE inline float adjusted(float logit, const SeenToken& token, float repetition,
                                        float frequency, float presence) {
  float penalized = logit;
  if (token.times >= 0) penalized = logit > 0.0f ? logit / repetition : logit * repetition;
  if (token.times > 0) {
    // The product is exact in f64, so that a fused multiply-add gives the same.
    const double taken = static_cast<double>(frequency) * token.times + presence;
    penalized = static_cast<float>(penalized - taken);
  }
  return token.bias == 0.0f ? penalized
                            : static_cast<float>(static_cast<double>(penalized) + token.bias);
}

// Penalties and biases apply to the tokens in `seen`, each of which is there once; then the mask
// `allowed` of token_filter.h, of all tokens, if there is one: the logits of others count as minus
// infinity. Then filters, in the order temperature, top-k, top-p, min-p, each to the result of the
// previous one. A pure function of its arguments: `stream` identifies the sequence, `index` the
// token in it. Returns kNoToken for logits from which none can be drawn. ctx: whose threads share
// the work on large vocabularies; sums then have other roundings, which decide only where a random
// number is within 1e-13 of a boundary.
int32_t sample(std::span<const float> logits, const SamplerOptions& options, uint64_t stream,
               uint64_t index, std::span<const SeenToken> seen = {}, Context* ctx = nullptr,
               std::span<const uint32_t> allowed = {});

// The same, without a copy of the logits where there is no mask: those of the tokens in `seen` are
// changed and put back.
int32_t sample_in_place(std::span<float> logits, const SamplerOptions& options, uint64_t stream,
                        uint64_t index, std::span<const SeenToken> seen, Context* ctx = nullptr,
                        std::span<const uint32_t> allowed = {});

}  // namespace twell
