// SPDX-License-Identifier: Apache-2.0
// Passes over all logits of a row that the sampler makes; Highway, dispatched at run time. None of
// them sorts: logits are counted into buckets of falling value, and only a bucket is looked at
// closer (bench/results/2026-11-26-cpu-sampler.txt).
#pragma once

#include <cstdint>
#include <span>

#include "twell/infer/sampler.h"

namespace twell {

struct LogitRange {
  float highest, lowest;
  bool has_nan;  // the others are of no use then
};
// There must be at least one logit.
LogitRange logit_range(std::span<const float> logits);

// Replaces the logit of each seen token by adjusted() of it, with the same bits, and writes to
// `before` what it was. Tokens outside the vocabulary are passed over.
struct Penalties {
  float repetition, frequency, presence;
};
void adjust_logits(std::span<float> logits, std::span<const SeenToken> seen,
                   const Penalties& penalties, float* before);

// The first position of a value that is among the logits.
int64_t first_of(std::span<const float> logits, float value);

// A logit's weight is its probability relative to the most likely one.
struct LogitWeights {
  float top;        // the highest logit
  double per_unit;  // 1 / temperature
};

// Bucket of a logit: (first - logit) * scale, rounded down, at most kLogitBuckets - 1.
inline constexpr int32_t kLogitBuckets = 512;
struct LogitBuckets {
  float first;  // no logit is higher
  float scale;
};

// Adds each logit's weight to its bucket's mass. Returns the sum of those weights that are at least
// `least`.
double add_to_buckets(std::span<const float> logits, const LogitWeights& weights,
                      const LogitBuckets& buckets, double least, double (&mass)[kLogitBuckets]);

// The positions of a bucket's logits, rising, written to `positions`, which has room for all logits
// and a vector (kGatherPadding) more; returns how many there are.
inline constexpr int64_t kGatherPadding = 64;
int64_t gather_bucket(std::span<const float> logits, const LogitBuckets& buckets, int32_t bucket,
                      int32_t* positions);
// The same for logits of at least `lowest`.
int64_t gather_from(std::span<const float> logits, float lowest, int32_t* positions);

// The weight of each logit, with the bits that add_to_buckets() adds.
void weigh(std::span<const float> logits, const LogitWeights& weights, double* to);

}  // namespace twell
