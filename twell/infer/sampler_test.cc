// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/rng.h"
#include "twell/grammar/token_filter.h"
#include "twell/infer/sampler_simd.h"

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
  EXPECT_FLOAT_EQ(adjusted(-3.0f, {.id = 0, .times = 0}, 2.0f, 0.0f, 0.0f), -6.0f);
  EXPECT_FLOAT_EQ(adjusted(3.0f, {.id = 0, .times = 2}, 2.0f, 0.25f, 0.5f), 0.5f);
}

TEST(Sampler, BiasesAreAddedBehindPenalties) {
  const auto greedy = [](SamplerOptions options, std::vector<SeenToken> seen) {
    options.temperature = 0.0f;
    return sample(kLogits, options, 0, 0, seen);
  };
  constexpr int32_t kNowhere = SeenToken::kNowhere;
  EXPECT_EQ(greedy({}, {{4, kNowhere, 5.5f}}), 4);
  EXPECT_EQ(greedy({}, {{1, kNowhere, -100.0f}}), 3);
  // Its penalty does not reach a token that is in no text.
  EXPECT_EQ(greedy({.repetition_penalty = 9.0f}, {{1, kNowhere, 0.5f}}), 1);
  EXPECT_EQ(greedy({.repetition_penalty = 9.0f}, {{1, 0, 0.5f}}), 3);
  EXPECT_FLOAT_EQ(adjusted(3.0f, {.id = 0, .times = 2, .bias = -4.0f}, 2.0f, 0.25f, 0.5f), -3.5f);
  EXPECT_FLOAT_EQ(adjusted(-3.0f, {.id = 0, .times = kNowhere, .bias = 1.0f}, 2.0f, 1.0f, 1.0f),
                  -2.0f);
}

// Tokens of a prompt or with a bias that the logits do not have.
TEST(Sampler, TokensBehindTheLogitsAreOfNoInterest) {
  const std::vector<SeenToken> seen = {{5, 1, 100.0f}, {6, SeenToken::kNowhere, 100.0f}};
  for (const float temperature : {0.0f, 1.0f}) {
    SamplerOptions options{.temperature = temperature, .presence_penalty = 1.0f};
    EXPECT_EQ(sample(kLogits, options, 0, 0, seen), sample(kLogits, options, 0, 0));
  }
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

// Applies one filter after the other to the sorted vocabulary, as sampler.h says it.
int32_t sample_of_sorted(std::span<const float> logits, std::vector<int32_t> ids,
                         const SamplerOptions& options, uint64_t index) {
  const auto logit = [&](int32_t id) { return logits[static_cast<size_t>(id)]; };
  if (options.temperature == 0.0f) return ids[0];
  if (options.top_k > 0) ids.resize(std::min(ids.size(), static_cast<size_t>(options.top_k)));
  std::vector<double> weights;
  const auto sum = [&] { return std::accumulate(weights.begin(), weights.end(), 0.0); };
  for (const int32_t id : ids) {
    weights.push_back(
        std::exp((static_cast<double>(logit(id)) - logit(ids[0])) / options.temperature));
  }
  if (options.top_p < 1.0f) {
    const double limit = options.top_p * sum();
    double mass = 0.0;
    size_t keep = 0;
    while (keep < weights.size() && mass < limit) mass += weights[keep++];
    weights.resize(keep);
  }
  while (weights.back() < static_cast<double>(options.min_p)) weights.pop_back();
  double left = static_cast<double>(uniform(options.seed, 0, index)) * sum();
  for (size_t i = 0; i + 1 < weights.size(); ++i) {
    left -= weights[i];
    if (left < 0.0) return ids[i];
  }
  return ids[weights.size() - 1];
}

// Whatever lies in a bucket, in a vector, or in a thread's part.
TEST(Sampler, DrawsWhatASortedVocabularyGives) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  struct Kind {
    const char* name;
    std::function<float(uint64_t)> logit;
  };
  const auto gauss = [](uint64_t i) { return normal(1, 0, i); };
  const std::vector<Kind> kinds = {
      {"flat", gauss},
      {"peaked", [&](uint64_t i) { return 12.0f * gauss(i); }},
      {"ties", [&](uint64_t i) { return std::round(2.0f * gauss(i)) / 2.0f; }},
      {"two values", [&](uint64_t i) { return i % 3 == 0 ? 1.0f : -1.0f; }},
      {"all equal", [](uint64_t) { return -7.5f; }},
      {"almost equal", [](uint64_t i) { return i % 2 == 0 ? 1e-40f : 0.0f; }},
      {"few above many", [](uint64_t i) { return i % 1000 == 7 ? 90.0f + normal(2, 0, i) : 0.0f; }},
      {"minus infinity", [&](uint64_t i) { return i % 5 == 1 ? gauss(i) : -kInfinity; }}};
  std::vector<SamplerOptions> all = {{.temperature = 0.0f}};
  for (const float temperature : {1.0f, 0.05f, 1e-40f, 30.0f}) {
    for (const float top_p : {1.0f, 0.9f, 0.3f}) {
      for (const float min_p : {0.0f, 0.05f, 0.9f}) {
        for (const int64_t top_k : {0, 40, 700}) {
          all.push_back({temperature, top_k, top_p, min_p});
          all.back().seed = all.size();
        }
      }
    }
  }
  Context ctx(3);
  for (const Kind& kind : kinds) {
    for (const size_t size : {2, 65, 521, 4099, 25'003}) {
      std::vector<float> logits(size);
      for (size_t i = 0; i < size; ++i) logits[i] = kind.logit(i + 1);
      std::vector<int32_t> sorted(size);
      std::iota(sorted.begin(), sorted.end(), 0);
      std::ranges::stable_sort(sorted, std::greater<>(),
                               [&](int32_t id) { return logits[static_cast<size_t>(id)]; });
      for (const SamplerOptions& options : all) {
        // Large vocabularies take long; each kind of logits has other options there.
        const auto other = static_cast<uint64_t>(&kind - kinds.data());
        if (size > 500 && options.seed % 4 != other % 4) continue;
        if (size > 4'000 && options.seed % 5 != other % 5) continue;
        if (size > 20'000 && options.seed % 25 != other) continue;
        for (uint64_t index = 0; index < (size > 500 ? 1u : 2u); ++index) {
          const int32_t want = sample_of_sorted(logits, sorted, options, index);
          for (Context* const with : {static_cast<Context*>(nullptr), &ctx}) {
            const int32_t got = sample(logits, options, 0, index, {}, with);
            // Equal logits far apart in rank: sums in another order decide.
            if (got != want &&
                logits[static_cast<size_t>(got)] == logits[static_cast<size_t>(want)] &&
                std::abs(got - want) <= 3) {
              continue;
            }
            ASSERT_EQ(got, want) << kind.name << ", " << size << " words, temperature "
                                 << options.temperature << ", top-p " << options.top_p << ", min-p "
                                 << options.min_p << ", top-k " << options.top_k;
          }
        }
      }
    }
  }
}

// Penalties and biases of seen tokens change the logits as adjusted() does, to the bit, for all
// numbers of tokens that vectors and blocks divide differently, and are taken back.
TEST(Sampler, DrawsInPlaceWhatItDrawsFromACopy) {
  Context ctx(3);
  for (const size_t size : {1, 7, 300, 5003, 40'009}) {
    std::vector<float> logits(size);
    for (size_t i = 0; i < size; ++i) logits[i] = 3.0f * normal(4, 0, i);
    const std::vector<float> before = logits;
    for (const size_t count : {0, 1, 3, 63, 64, 65, 401}) {
      if (size > 20'000 && count != 3 && count != 401) continue;
      std::vector<SeenToken> seen;
      for (size_t i = 0; i < count && i * 11 < 2 * size; ++i) {  // half of them outside
        const auto id = static_cast<int32_t>(i * 11 % (2 * size));
        const float bias = i % 3 == 1 ? 0.1f * static_cast<float>(i) - 5.0f : 0.0f;
        seen.push_back({id, static_cast<int32_t>(i % 5) - 1, bias});
      }
      for (SamplerOptions options :
           {SamplerOptions{.temperature = 0.0f}, SamplerOptions{}, SamplerOptions{.top_k = 5},
            SamplerOptions{.top_p = 0.9f, .min_p = 0.01f}}) {
        options.repetition_penalty = 1.3f;
        options.frequency_penalty = 0.37f;
        options.presence_penalty = -0.11f;
        std::vector<float> want = logits;
        for (const SeenToken& token : seen) {
          if (token.id >= std::ssize(want)) continue;
          float& logit = want[static_cast<size_t>(token.id)];
          logit = adjusted(logit, token, 1.3f, 0.37f, -0.11f);
        }
        for (uint64_t index = 0; index < (size > 4'000 ? 1u : 5u); ++index) {
          const int32_t id = sample(want, options, 0, index, {}, &ctx);
          ASSERT_EQ(sample(logits, options, 0, index, seen, &ctx), id) << size << ", " << count;
          ASSERT_EQ(sample_in_place(logits, options, 0, index, seen, &ctx), id);
          ASSERT_EQ(logits, before) << size << ", " << count;
        }
        std::vector<float> adjusted_before(count + 1), all = logits;
        adjust_logits(all, seen, {1.3f, 0.37f, -0.11f}, adjusted_before.data());
        ASSERT_EQ(all, want) << size << ", " << count;
      }
    }
  }
}

// Tokens outside the mask count as impossible, whatever their logits; penalties come first.
TEST(Sampler, MasksAreMinusInfinity) {
  const float minus_inf = -std::numeric_limits<float>::infinity();
  for (const size_t size : {3, 64, 100, 5003}) {
    std::vector<float> logits(size);
    for (size_t i = 0; i < size; ++i) logits[i] = 3.0f * normal(4, 0, i);
    std::vector<uint32_t> mask(static_cast<size_t>(token_mask_words(static_cast<int64_t>(size))));
    std::vector<float> want = logits;
    for (size_t i = 0; i < size; ++i) {
      // Whole words of either kind, and mixed ones.
      const bool allowed = i / 32 % 3 == 0 ? i % 5 == 1 : i / 32 % 3 == 1;
      if (allowed) mask[i / 32] |= 1u << (i % 32);
      if (!allowed) want[i] = minus_inf;
    }
    logits[2] = std::numeric_limits<float>::quiet_NaN();  // not allowed
    const std::vector<SeenToken> seen = {{1, 1}};
    for (SamplerOptions options :
         {SamplerOptions{.temperature = 0.0f}, SamplerOptions{},
          SamplerOptions{.top_k = 2, .top_p = 0.9f}, SamplerOptions{.min_p = 0.2f}}) {
      options.presence_penalty = 0.5f;
      for (uint64_t i = 0; i < 20; ++i) {
        ASSERT_EQ(sample(logits, options, 0, i, seen, nullptr, mask),
                  sample(want, options, 0, i, seen))
            << size << ", " << i;
      }
    }
    std::ranges::fill(mask, 0u);
    EXPECT_EQ(sample(want, {}, 0, 0, {}, nullptr, mask), kNoToken);
  }
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
