// SPDX-License-Identifier: Apache-2.0
#include "twell/tasks/choice_scores.h"

#include <gtest/gtest.h>

#include <cmath>

#include "twell/base/error.h"
#include "twell/base/rng.h"
#include "twell/model/scorer_cpu.h"
#include "twell/tokenizer/test_tokenizer.h"

namespace twell {
namespace {

ModelConfig config() {
  ModelConfig out;
  out.vocab_size = 257;
  out.width = 32;
  out.ffn = 96;
  out.layers = 2;
  out.heads = 4;
  out.kv_heads = 2;
  out.head_dim = 8;
  out.context = 24;
  out.init_std = 0.3;
  return out;
}

TaskItem item(const std::vector<std::pair<std::string, std::string>>& texts) {
  TaskItem out;
  for (const auto& [context, continuation] : texts)
    out.choices.push_back({context, continuation, 1});
  return out;
}

std::vector<int32_t> random_ids(size_t count, uint64_t seed) {
  std::vector<int32_t> ids(count);
  for (size_t i = 0; i < count; ++i) ids[i] = static_cast<int32_t>(uniform_below(seed, 0, i, 257));
  return ids;
}

// One forward pass over context and continuation without a cache.
double reference_score(Context& ctx, const Model& model, const std::vector<int32_t>& context,
                       const std::vector<int32_t>& continuation) {
  std::vector<int32_t> ids = context;
  ids.insert(ids.end(), continuation.begin(), continuation.end());
  const int64_t tokens = std::ssize(ids) - 1;
  ForwardState state(model.config, FfnPolicy::kDense);
  Buffer<float> hidden(tokens * model.config.width), row(model.config.vocab_size * tokens);
  const ForwardSequence sequence{.tokens = tokens, .slot = 0};
  forward(ctx, model, state,
          {.ids = std::span(ids).first(static_cast<size_t>(tokens)),
           .sequences = {&sequence, 1},
           .hidden = hidden.matrix(tokens, model.config.width)});
  const MatrixF out = row.matrix(tokens, model.config.vocab_size);
  logits(ctx, model, hidden.matrix(tokens, model.config.width), out);
  double score = 0.0;
  for (int64_t t = std::ssize(context) - 1; t < tokens; ++t) {
    double sum = 0.0;
    for (int64_t v = 0; v < out.cols; ++v) sum += std::exp(static_cast<double>(out(t, v)));
    score += static_cast<double>(out(t, ids[static_cast<size_t>(t) + 1])) - std::log(sum);
  }
  return score;
}

TEST(ChoiceEncoder, SpacesBelongToTheContinuation) {
  const Tokenizer tokenizer = byte_tokenizer();
  const ChoiceEncoder encoder(tokenizer, config(), false);
  const auto groups = encoder.encode(item({{"ab  ", " c"}, {"ab", "  d"}, {"x", "y"}}), "f line 1");
  ASSERT_EQ(groups.size(), 2u);  // the first two have the same context
  EXPECT_EQ(groups[0].context, tokenizer.encode("ab"));
  EXPECT_EQ(groups[0].continuations[0], tokenizer.encode("   c"));
  EXPECT_EQ(groups[0].continuations[1], tokenizer.encode("  d"));
  EXPECT_EQ(groups[0].choices, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(groups[1].choices, (std::vector<int64_t>{2}));
  EXPECT_EQ(groups[0].tokens(), 2 + 4 - 1);
}

TEST(ChoiceEncoder, EmptyContextAndTooLongOnes) {
  const Tokenizer tokenizer = byte_tokenizer();
  ModelConfig model = config();
  const auto of = [&](const std::string& context, const std::string& continuation) {
    return ChoiceEncoder(tokenizer, model, false)
        .encode(item({{context, continuation}}), "f line 1");
  };
  EXPECT_EQ(of("", "ab")[0].context, std::vector<int32_t>{tokenizer.eos_token()});
  model.bos_token = 7;
  EXPECT_EQ(of("", "ab")[0].context, std::vector<int32_t>{7});
  // 24 tokens fit; the last of them is not fed to the model.
  EXPECT_EQ(of(std::string(30, 'a'), "bcd")[0].context.size(), 22u);
  EXPECT_EQ(of(std::string(22, 'a'), "bcd")[0].context.size(), 22u);
  EXPECT_EQ(of("aaaa", std::string(24, 'b'))[0].context.size(), 1u);
  EXPECT_THROW(of("aaaa", std::string(25, 'b')), InputError);
  EXPECT_THROW(of("a", ""), InputError);
  EXPECT_THROW(of(" ", "b"), InputError);
  // This tokenizer's template has no begin token, so begin_token changes nothing.
  EXPECT_EQ(ChoiceEncoder(tokenizer, model, true).encode(item({{"a", "b"}}), "f")[0].context.size(),
            1u);
}

TEST(ContinuationScores, EqualWholeForwardsOneByOne) {
  Context ctx(2);
  Model model(config());
  init_weights(ctx, model, 1);
  std::vector<ChoiceGroup> groups;
  uint64_t seed = 0;
  for (const auto& [context, lengths] : std::vector<std::pair<size_t, std::vector<size_t>>>{
           {5, {3, 1, 9, 3}}, {1, {1}}, {20, {5, 2}}, {24, {1, 1}}, {7, {2, 6, 1, 4, 4}}}) {
    ChoiceGroup group{.context = random_ids(context, ++seed), .continuations = {}, .choices = {}};
    for (const size_t length : lengths) group.continuations.push_back(random_ids(length, ++seed));
    groups.push_back(std::move(group));
  }
  for (const FfnPolicy policy : {FfnPolicy::kDense, FfnPolicy::kAuto}) {
    ScorerCpu scorer(ctx, model, policy);
    const auto scores = continuation_scores(scorer, groups);
    ASSERT_EQ(scores.size(), groups.size());
    for (size_t g = 0; g < groups.size(); ++g) {
      ASSERT_EQ(scores[g].size(), groups[g].continuations.size());
      for (size_t i = 0; i < scores[g].size(); ++i) {
        const double expected =
            reference_score(ctx, model, groups[g].context, groups[g].continuations[i]);
        // The tolerance allows for sums of a few hundred products per scored token.
        const auto tokens = static_cast<double>(groups[g].continuations[i].size());
        EXPECT_NEAR(scores[g][i], expected, 1e-4 * tokens) << g << " " << i;
      }
    }
  }
  ScorerCpu scorer(ctx, model);
  EXPECT_TRUE(continuation_scores(scorer, {}).empty());
}

}  // namespace
}  // namespace twell
