// SPDX-License-Identifier: Apache-2.0
#include "twell/data/batch_sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "twell/base/test_folder.h"
#include "twell/data/shard_writer.h"
#include "twell/data/shards.h"

namespace twell {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<uint64_t> order(uint64_t n, uint64_t seed, uint64_t epoch) {
  std::vector<uint64_t> places;
  for (uint64_t i = 0; i < n; ++i) places.push_back(permute(i, n, seed, epoch));
  return places;
}

TEST(Permute, VisitsEveryPlaceOnce) {
  for (uint64_t n = 1; n < 300; ++n) {
    auto places = order(n, 3, n);
    std::sort(places.begin(), places.end());
    for (uint64_t i = 0; i < n; ++i) ASSERT_EQ(places[i], i) << n;
  }
  auto places = order(70001, 9, 0);
  std::sort(places.begin(), places.end());
  for (uint64_t i = 0; i < places.size(); ++i) ASSERT_EQ(places[i], i);
}

TEST(Permute, DependsOnSeedAndEpoch) {
  EXPECT_EQ(order(100, 1, 0), order(100, 1, 0));
  EXPECT_NE(order(100, 1, 0), order(100, 2, 0));
  EXPECT_NE(order(100, 1, 0), order(100, 1, 1));
}

TEST(Permute, LooksRandom) {
  // Over many keys each index maps to each place equally often, and neighbours are separated.
  constexpr uint64_t kN = 10, kKeys = 20000;
  std::vector<int64_t> hits(kN * kN);
  int64_t neighbours = 0;
  for (uint64_t key = 0; key < kKeys; ++key) {
    const auto places = order(kN, 7, key);
    for (uint64_t i = 0; i < kN; ++i) ++hits[i * kN + places[i]];
    for (uint64_t i = 1; i < kN; ++i) neighbours += places[i] == places[i - 1] + 1;
  }
  const double expected = kKeys / static_cast<double>(kN);
  for (const int64_t count : hits) {
    EXPECT_NEAR(static_cast<double>(count), expected, 5 * std::sqrt(expected));
  }
  // Each of the n - 1 adjacent pairs stays consecutive with probability 1 / n.
  EXPECT_NEAR(static_cast<double>(neighbours) / kKeys, (kN - 1) / static_cast<double>(kN), 0.05);
}

TEST(Permute, WorksAtAnySize) {
  for (int bits = 1; bits < 62; ++bits) {
    const uint64_t n = (uint64_t{1} << bits) + 1;
    EXPECT_LT(permute(0, n, 1, 2), n);
    EXPECT_LT(permute(n - 1, n, 1, 2), n);
    EXPECT_NE(permute(0, n, 1, 2), permute(n - 1, n, 1, 2));
  }
  EXPECT_THROW(permute(5, 5, 0, 0), Error);
}

// The order is part of the format: a run resumed with a newer build must see the same data.
TEST(Permute, StaysTheSame) {
  EXPECT_EQ(order(10, 42, 3), (std::vector<uint64_t>{7, 4, 1, 5, 6, 2, 8, 0, 3, 9}));
}

// Shards whose train stream is 0, 1, 2, ..., count - 1, in files of 100 tokens.
class Sampler : public ::testing::Test {
 protected:
  static constexpr int64_t kVocab = 5000;

  ShardSet make(int64_t count, double validation_fraction = 0) {
    const int64_t eos = count - 1;
    TextSource source({.paths = {folder_.write("text", std::string(count - 1, 'x'))}});
    write_shards(source,
                 {.encode =
                      [](std::string_view text, std::vector<int32_t>& ids) {
                        ids.resize(text.size());
                        std::iota(ids.begin(), ids.end(), 0);
                      },
                  .token_bytes = [](int32_t) { return 1; },
                  .eos = static_cast<int32_t>(eos),
                  .vocab_size = kVocab,
                  .hash = "count"},
                 folder_.path() / "shards",
                 {.validation_fraction = validation_fraction, .shard_tokens = 100});
    return ShardSet(folder_.path() / "shards", "count", kVocab);
  }

  TempFolder folder_;
};

TEST_F(Sampler, TargetsFollowInputs) {
  const ShardSet shards = make(1000);
  for (const int64_t length : {1, 2, 99, 100, 101, 499, 999}) {
    const BatchSampler sampler(shards, Split::kTrain, length, 1, true);
    EXPECT_EQ(sampler.windows(), 999 / length);
    std::vector<int32_t> inputs(length), targets(length);
    std::vector<int> seen(1000);
    for (int64_t index = 0; index < sampler.windows(); ++index) {
      sampler.sequence(index, inputs, targets);
      ASSERT_EQ(inputs[0], sampler.window(index) * length);
      for (int64_t t = 0; t < length; ++t) {
        ASSERT_EQ(inputs[t], inputs[0] + t);
        ASSERT_EQ(targets[t], inputs[t] + 1);
        ++seen[targets[t]];
      }
    }
    // Every token but the first is a target once, except those of an incomplete last window.
    EXPECT_EQ(seen[0], 0);
    for (int64_t id = 1; id < 1000; ++id) {
      ASSERT_EQ(seen[id], id <= sampler.windows() * length ? 1 : 0) << length;
    }
  }
}

TEST_F(Sampler, EveryEpochIsAFreshOrderOfAllWindows) {
  const ShardSet shards = make(1000);
  const BatchSampler sampler(shards, Split::kTrain, 9, 5, true);
  const int64_t n = sampler.windows();
  ASSERT_EQ(n, 111);
  std::vector<std::vector<int64_t>> epochs(3);
  for (int64_t index = 0; index < 3 * n; ++index) {
    epochs[index / n].push_back(sampler.window(index));
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_NE(epochs[1], epochs[2]);
  for (auto& epoch : epochs) {
    std::sort(epoch.begin(), epoch.end());
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(epoch[i], i);
  }
  // The sampler is stateless: any instance gives any position at any time.
  const BatchSampler again(shards, Split::kTrain, 9, 5, true);
  for (int64_t index = 3 * n - 1; index >= 0; index -= 17) {
    EXPECT_EQ(again.window(index), sampler.window(index));
  }
  EXPECT_THROW(sampler.window(-1), Error);
}

TEST_F(Sampler, InOrderWithoutShuffle) {
  const ShardSet shards = make(1000, 0.2);
  const BatchSampler sampler(shards, Split::kValidation, 10, 5, false);
  ASSERT_EQ(sampler.windows(), 19);
  std::vector<int32_t> inputs(10), targets(10);
  for (int64_t index = 0; index < 40; ++index) {
    sampler.sequence(index, inputs, targets);
    EXPECT_EQ(inputs[0], 800 + index % 19 * 10);
    EXPECT_EQ(targets[9], inputs[0] + 10);
  }
  std::vector<int32_t> wrong_size(9);
  EXPECT_THROW(sampler.sequence(0, wrong_size, targets), Error);
}

TEST_F(Sampler, RefusesASplitShorterThanOneWindow) {
  const ShardSet shards = make(1000);
  EXPECT_EQ(BatchSampler(shards, Split::kTrain, 999, 0, true).windows(), 1);
  const auto fault = [&](Split split, int64_t length) -> std::string {
    try {
      BatchSampler(shards, split, length, 0, true);
    } catch (const InputError& error) {
      return error.what();
    }
    return "no fault";
  };
  EXPECT_THAT(fault(Split::kTrain, 1000),
              AllOf(HasSubstr("train split has 1000 tokens"), HasSubstr("length 1000")));
  EXPECT_THAT(fault(Split::kValidation, 8), HasSubstr("validation split has 0 tokens"));
  EXPECT_THAT(fault(Split::kTrain, INT64_MAX), HasSubstr("too few"));
  EXPECT_THAT(fault(Split::kTrain, 0), HasSubstr("must be positive"));
}

TEST(Documents, EndWithTheirTokenAndWithTheSequence) {
  using Lengths = std::vector<int64_t>;
  constexpr int32_t kEnd = 9;
  EXPECT_EQ(document_lengths(std::vector<int32_t>{1, 2, 3, 4, 5, 6}, 6, kEnd), Lengths({6}));
  EXPECT_EQ(document_lengths(std::vector<int32_t>{1, 2, 9, 4, 5, 6}, 6, kEnd), Lengths({3, 3}));
  EXPECT_EQ(document_lengths(std::vector<int32_t>{1, 2, 9, 4, 5, 9}, 3, kEnd), Lengths({3, 3}));
  EXPECT_EQ(document_lengths(std::vector<int32_t>{9, 9, 3, 4, 5, 6, 7, 9}, 4, kEnd),
            Lengths({1, 1, 2, 4}));
  EXPECT_EQ(document_lengths({}, 4, kEnd), Lengths());
  EXPECT_THROW(document_lengths(std::vector<int32_t>{1, 2, 3}, 2, kEnd), Error);
}

}  // namespace
}  // namespace twell
