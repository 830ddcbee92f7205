// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <vector>

#include "twell/base/error.h"

namespace twell {
namespace {

const std::vector<float> kLogits = {0.0f, 2.0f, 1.0f, 2.0f, -3.0f};

std::map<int32_t, int> draw(const SamplerOptions& options, int count) {
  std::map<int32_t, int> histogram;
  for (int i = 0; i < count; ++i)
    ++histogram[sample(kLogits, options, 0, static_cast<uint64_t>(i))];
  return histogram;
}

TEST(Sampler, GreedyTakesLowestIdAmongEquals) {
  EXPECT_EQ(sample(kLogits, {.temperature = 0.0f}, 0, 0), 1);
}

TEST(Sampler, FrequenciesFollowTheSoftmax) {
  const int count = 40000;
  const auto histogram = draw({.seed = 7}, count);
  double total = 0.0;
  for (const float logit : kLogits) total += std::exp(logit);
  for (size_t i = 0; i < kLogits.size(); ++i) {
    const double p = std::exp(kLogits[i]) / total;
    // Five standard deviations of a binomial count.
    const double tolerance = 5.0 * std::sqrt(p * (1.0 - p) * count) + 1.0;
    const auto found = histogram.find(static_cast<int32_t>(i));
    const int seen = found == histogram.end() ? 0 : found->second;
    EXPECT_NEAR(seen, p * count, tolerance) << "token " << i;
  }
}

TEST(Sampler, TopKKeepsTheMostLikely) {
  std::set<int32_t> seen;
  for (const auto& [id, n] : draw({.top_k = 3}, 2000)) seen.insert(id);
  EXPECT_EQ(seen, (std::set<int32_t>{1, 2, 3}));
  EXPECT_EQ(draw({.top_k = 1}, 50).size(), 1u);
  EXPECT_EQ(draw({.top_k = 1000}, 50), draw({}, 50));
}

TEST(Sampler, TopPKeepsTheSmallestSufficientSet) {
  // The two tokens at logit 2 hold 0.79 of the mass, one of them 0.395.
  EXPECT_EQ(draw({.top_p = 0.3f}, 500).size(), 1u);
  EXPECT_EQ(draw({.top_p = 0.7f}, 500).size(), 2u);
  EXPECT_EQ(draw({.top_p = 0.9f}, 2000).size(), 3u);
}

TEST(Sampler, MinPDropsTheUnlikely) {
  // Relative to the best: exp(-1) = 0.37 for logit 1, exp(-2) = 0.14 for logit 0.
  EXPECT_EQ(draw({.min_p = 0.5f}, 500).size(), 2u);
  EXPECT_EQ(draw({.min_p = 0.2f}, 2000).size(), 3u);
}

TEST(Sampler, PenaltiesMakeSeenTokensLessLikely) {
  const auto greedy = [](SamplerOptions options, std::vector<SeenToken> seen) {
    options.temperature = 0.0f;
    return sample(kLogits, options, 0, 0, seen);
  };
  EXPECT_EQ(greedy({}, {{1, 5}}), 1);  // no penalty
  EXPECT_EQ(greedy({.repetition_penalty = 1.1f}, {{1, 0}}), 3);
  EXPECT_EQ(greedy({.repetition_penalty = 4.0f}, {{1, 0}, {3, 2}}), 2);
  EXPECT_EQ(greedy({.repetition_penalty = 0.5f}, {{2, 0}, {1, 0}}), 1);
  EXPECT_EQ(greedy({.presence_penalty = 0.1f}, {{1, 1}}), 3);
  EXPECT_EQ(greedy({.presence_penalty = 0.1f}, {{1, 0}}), 1);  // of the prompt only
  EXPECT_EQ(greedy({.frequency_penalty = 0.4f}, {{1, 1}, {3, 3}}), 1);
  EXPECT_EQ(greedy({.frequency_penalty = 0.4f}, {{1, 3}, {3, 3}}), 2);
  EXPECT_EQ(greedy({.frequency_penalty = -1.0f}, {{4, 6}}), 4);
  // A negative logit grows in size.
  EXPECT_FLOAT_EQ(penalized(-3.0f, 0, 2.0f, 0.0f, 0.0f), -6.0f);
  EXPECT_FLOAT_EQ(penalized(3.0f, 2, 2.0f, 0.25f, 0.5f), 0.5f);
}

TEST(Sampler, SameSeedSameChoices) {
  EXPECT_EQ(draw({.seed = 3}, 200), draw({.seed = 3}, 200));
  std::vector<int32_t> first, second;
  for (uint64_t i = 0; i < 64; ++i) {
    first.push_back(sample(kLogits, {.seed = 3}, 0, i));
    second.push_back(sample(kLogits, {.seed = 3}, 1, i));
  }
  EXPECT_NE(first, second);  // another stream has other random numbers
}

TEST(Sampler, MinusInfinityIsNeverDrawn) {
  const float minus_inf = -std::numeric_limits<float>::infinity();
  const std::vector<float> logits = {minus_inf, 1.0f, minus_inf};
  for (uint64_t i = 0; i < 100; ++i) EXPECT_EQ(sample(logits, {}, 0, i), 1);
}

TEST(Sampler, RefusesWhatCannotBeSampled) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float minus_inf = -std::numeric_limits<float>::infinity();
  for (const float temperature : {0.0f, 1.0f}) {
    const SamplerOptions options{.temperature = temperature};
    EXPECT_EQ(sample(std::vector<float>{0.0f, nan}, options, 0, 0), kNoToken);
    EXPECT_EQ(sample(std::vector<float>{minus_inf, minus_inf}, options, 0, 0), kNoToken);
    EXPECT_EQ(sample(std::vector<float>{-minus_inf, 0.0f}, options, 0, 0), kNoToken);
  }
  EXPECT_THROW(SamplerOptions{.temperature = -1.0f}.validate(), InputError);
  EXPECT_THROW(SamplerOptions{.temperature = nan}.validate(), InputError);
  EXPECT_THROW(SamplerOptions{.top_k = -1}.validate(), InputError);
  EXPECT_THROW(SamplerOptions{.top_p = 0.0f}.validate(), InputError);
  EXPECT_THROW(SamplerOptions{.top_p = 1.5f}.validate(), InputError);
  EXPECT_THROW(SamplerOptions{.min_p = 1.0f}.validate(), InputError);
  EXPECT_THROW(SamplerOptions{.repetition_penalty = 0.0f}.validate(), InputError);
  EXPECT_THROW(SamplerOptions{.frequency_penalty = nan}.validate(), InputError);
  EXPECT_THROW(SamplerOptions{.presence_penalty = nan}.validate(), InputError);
}

}  // namespace
}  // namespace twell
