// SPDX-License-Identifier: Apache-2.0
// Two ranks train every family, activation and loss as one rank does. They are threads here, which
// connect once for all of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "twell/dist/test_ranks.h"
#include "twell/train/engine_cpu.h"
#include "twell/train/test_rank_variants.h"

namespace twell {
namespace {

using testing::Each;
using testing::StrEq;

class RankVariantsTest : public testing::Test {
 protected:
  VariantRun train(const RunVariant& variant, const TrainingData& data, Communicator* all) const {
    const VariantSetup setup(variant, data_.tokenizer.vocab_size(), all);
    Context ctx(1);
    Model model = setup.model(ctx, 3);
    const auto teacher = setup.teacher(ctx);
    TrainEngineCpu engine(ctx, model, data, setup.options, teacher.get(), all);
    return run_variant(ctx, engine, data, setup.options);
  }
  void expect_each_as_on_one_rank(std::span<const RunVariant> variants, const TrainingData& data) {
    std::array<std::vector<VariantRun>, 2> two;
    const auto errors = run_ranks(std::ssize(two), [&](Communicator& all) {
      for (const RunVariant& variant : variants) {
        two[static_cast<size_t>(all.rank())].push_back(train(variant, data, &all));
      }
    });
    EXPECT_THAT(errors, Each(StrEq("")));
    Context ctx(1);
    for (size_t i = 0; i < variants.size(); ++i) {
      SCOPED_TRACE(variants[i].name);
      ASSERT_GT(std::min(two[0].size(), two[1].size()), i) << "a rank failed in this variant";
      expect_run_of_one_rank(
          VariantSetup(variants[i], data_.tokenizer.vocab_size(), nullptr).model(ctx, 3),
          {two[0][i], two[1][i]}, train(variants[i], data, nullptr), kTolerance);
    }
  }

  // From the same weights each micro-batch has the same gradients, and a sum of five rounds to f32
  // four times in any order. AdamW's division by the root of v amplifies that where a gradient is
  // nearly 0.
  static constexpr RankTolerance kTolerance{
      .first_loss = 1e-12, .loss = 1e-6, .gradient = 1e-6, .weights = 1e-3};
  TempFolder temp_;
  MicroData data_{temp_.path()};
};

TEST_F(RankVariantsTest, TwoRanksTrainEachAsOne) {
  expect_each_as_on_one_rank(kRunVariants, data_.shards);
}

TEST_F(RankVariantsTest, NeuronsThatFireOnOneRankAloneAreNotDead) {
  expect_each_as_on_one_rank(kSeldomVariants, data_.shards);
}

TEST_F(RankVariantsTest, TwoRanksTrainOnConversationsAsOne) {
  Context ctx(1);
  const int64_t length = micro_config(data_.tokenizer.vocab_size()).context;
  const auto talks = micro_talks(ctx, temp_.path(), data_.tokenizer, length);
  expect_each_as_on_one_rank(kTalkVariants, *talks);
}

}  // namespace
}  // namespace twell
