// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/rng.h"

namespace twell {
namespace {

struct Candidate {
  float logit;
  int32_t id;
};

// Sorts by falling logit, then by id, so that the choice is reproducible.
bool more_likely(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// Empty where no token can be drawn.
std::vector<Candidate> most_likely(std::span<const float> logits, int64_t count) {
  std::vector<Candidate> candidates(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) return {};
    candidates[i] = {logits[i], static_cast<int32_t>(i)};
  }
  const auto end = candidates.begin() + std::min<int64_t>(count, std::ssize(candidates));
  std::partial_sort(candidates.begin(), end, candidates.end(), more_likely);
  candidates.erase(end, candidates.end());
  if (!candidates.empty() && !std::isfinite(candidates.front().logit)) return {};
  return candidates;
}

// Probability of each candidate relative to that of the first.
std::vector<double> relative_weights(const std::vector<Candidate>& candidates, float temperature) {
  std::vector<double> weights;
  weights.reserve(candidates.size());
  const double top = candidates.front().logit;
  for (const Candidate& candidate : candidates) {
    weights.push_back(std::exp((static_cast<double>(candidate.logit) - top) / temperature));
  }
  return weights;
}

void keep_top_p(std::vector<double>& weights, double top_p) {
  const double limit = top_p * std::accumulate(weights.begin(), weights.end(), 0.0);
  double mass = 0.0;
  size_t keep = 0;
  while (keep < weights.size() && mass < limit) mass += weights[keep++];
  weights.resize(std::max<size_t>(keep, 1));
}

void keep_min_p(std::vector<double>& weights, double min_p) {
  while (weights.size() > 1 && weights.back() < min_p) weights.pop_back();
}

}  // namespace

void SamplerOptions::validate() const {
  TWELL_REQUIRE(temperature >= 0.0f && std::isfinite(temperature),
                "temperature must be 0 (greedy) or a positive number, got {}", temperature);
  TWELL_REQUIRE(top_k >= 0, "top-k must be 0 (off) or positive, got {}", top_k);
  TWELL_REQUIRE(top_p > 0.0f && top_p <= 1.0f, "top-p must be in (0, 1], got {}", top_p);
  TWELL_REQUIRE(min_p >= 0.0f && min_p < 1.0f, "min-p must be in [0, 1), got {}", min_p);
  TWELL_REQUIRE(repetition_penalty > 0.0f && std::isfinite(repetition_penalty),
                "the repetition penalty must be a positive number, 1 for none, got {}",
                repetition_penalty);
  TWELL_REQUIRE(std::isfinite(frequency_penalty), "the frequency penalty must be a number, got {}",
                frequency_penalty);
  TWELL_REQUIRE(std::isfinite(presence_penalty), "the presence penalty must be a number, got {}",
                presence_penalty);
}

int32_t sample(std::span<const float> logits, const SamplerOptions& options, uint64_t stream,
               uint64_t index, std::span<const SeenToken> seen) {
  std::vector<float> after_penalties;
  if (options.penalizes() && !seen.empty()) {
    after_penalties.assign(logits.begin(), logits.end());
    for (const auto& [id, times] : seen) {
      if (id >= std::ssize(logits)) continue;
      float& logit = after_penalties[static_cast<size_t>(id)];
      logit = penalized(logit, times, options.repetition_penalty, options.frequency_penalty,
                        options.presence_penalty);
    }
    logits = after_penalties;
  }
  const int64_t all = options.top_k > 0 ? options.top_k : std::ssize(logits);
  const std::vector<Candidate> candidates =
      most_likely(logits, options.temperature == 0.0f ? 1 : all);
  if (candidates.empty()) return kNoToken;
  if (options.temperature == 0.0f) return candidates.front().id;
  std::vector<double> weights = relative_weights(candidates, options.temperature);
  if (options.top_p < 1.0f) keep_top_p(weights, options.top_p);
  if (options.min_p > 0.0f) keep_min_p(weights, options.min_p);

  double remaining = static_cast<double>(uniform(options.seed, stream, index)) *
                     std::accumulate(weights.begin(), weights.end(), 0.0);
  for (size_t i = 0; i + 1 < weights.size(); ++i) {
    remaining -= weights[i];
    if (remaining < 0.0) return candidates[i].id;
  }
  return candidates[weights.size() - 1].id;
}

}  // namespace twell
