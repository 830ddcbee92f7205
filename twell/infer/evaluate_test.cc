// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/evaluate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "twell/base/error.h"
#include "twell/infer/session_cpu.h"
#include "twell/infer/test_model.h"
#include "twell/model/scorer_cpu.h"

namespace twell {
namespace {

// -log p(ids[i + 1]) given the tokens from `begin` on, one token at a time.
double token_loss(Context& ctx, const Model& model, const std::vector<int32_t>& ids, int64_t begin,
                  int64_t i) {
  SessionCpu session(ctx, model, {.ffn = FfnPolicy::kDense});
  const auto logits = session.append(
      0, std::span(ids).subspan(static_cast<size_t>(begin), static_cast<size_t>(i + 1 - begin)));
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
  return std::log(sum) - logits[static_cast<size_t>(ids[static_cast<size_t>(i) + 1])];
}

double reference_loss(Context& ctx, const Model& model, const std::vector<int32_t>& ids,
                      int64_t length, int64_t stride) {
  double total = 0.0;
  const int64_t last = std::ssize(ids) - 1;
  for (int64_t i = 0; i < last; ++i) {
    // The window that scores position i ends at the first of length, length + stride, ... beyond i.
    const int64_t end = i < length ? length : length + (i - length) / stride * stride + stride;
    const int64_t begin = std::max<int64_t>(0, std::min(end, last) - length);
    total += token_loss(ctx, model, ids, begin, i);
  }
  return total;
}

TEST(Evaluate, EqualsTokenByTokenScoring) {
  Context ctx(2);
  const auto model = test_model(ctx, kSmallVocab);
  const std::vector<int32_t> ids = random_ids(75, kSmallVocab, 9);
  for (const auto& [length, stride] :
       {std::pair<int64_t, int64_t>{48, 48}, {16, 16}, {16, 5}, {1, 1}, {48, 1}}) {
    ScorerCpu scorer(ctx, *model);
    Evaluator evaluator(scorer, {.length = length, .stride = stride, .batch_tokens = 100});
    evaluator.add(ids);
    const Evaluation& result = evaluator.finish();
    EXPECT_EQ(result.tokens, 74);
    const double expected = reference_loss(ctx, *model, ids, length, stride);
    EXPECT_NEAR(result.loss_sum, expected, 74 * 1e-4) << length << " " << stride;
    for (const LayerHistogram& layer : result.layers) EXPECT_EQ(layer.tokens(), 74);
  }
}

TEST(Evaluate, BatchingAndExecutionDoNotChangeTheResult) {
  Context ctx(2);
  const auto model = test_model(ctx, kSmallVocab);
  double first = 0.0;
  for (const int64_t batch : {1, 50, 4096}) {
    for (const FfnPolicy policy : {FfnPolicy::kDense, FfnPolicy::kTileUnion}) {
      ScorerCpu scorer(ctx, *model, policy);
      Evaluator evaluator(scorer, {.batch_tokens = batch});
      evaluator.add(random_ids(75, kSmallVocab, 9));
      evaluator.add(random_ids(3, kSmallVocab, 10));
      evaluator.add(random_ids(1, kSmallVocab, 10));  // nothing to score
      const Evaluation& result = evaluator.finish();
      EXPECT_EQ(result.tokens, 76);
      if (first == 0.0) first = result.loss_sum;
      EXPECT_NEAR(result.loss_sum, first, 76 * 1e-4);
    }
  }
}

TEST(Evaluate, DocumentsDoNotSeeEachOther) {
  Context ctx(2);
  const auto model = test_model(ctx, kSmallVocab);
  std::vector<int32_t> ids = random_ids(75, kSmallVocab - 1, 9);
  constexpr int32_t kEnd = kSmallVocab - 1;
  for (const size_t end : {0, 1, 15, 16, 40, 74}) ids[end] = kEnd;
  for (const int64_t stride : {16, 5}) {
    ScorerCpu scorer(ctx, *model);
    Evaluator evaluator(
        scorer, {.length = 16, .stride = stride, .batch_tokens = 100, .document_end = kEnd});
    evaluator.add(ids);
    double expected = 0.0;
    for (int64_t i = 0; i < 74; ++i) {
      const int64_t end = i < 16 ? 16 : 16 + (i - 16) / stride * stride + stride;
      int64_t begin = std::max<int64_t>(0, std::min<int64_t>(end, 74) - 16);
      for (int64_t j = begin; j < i; ++j) {
        if (ids[static_cast<size_t>(j)] == kEnd) begin = j + 1;
      }
      expected += token_loss(ctx, *model, ids, begin, i);
    }
    EXPECT_EQ(evaluator.finish().tokens, 74);
    EXPECT_NEAR(evaluator.so_far().loss_sum, expected, 74 * 1e-4) << stride;
  }
}

TEST(Evaluate, Figures) {
  Evaluation evaluation;
  evaluation.tokens = 4;
  evaluation.loss_sum = 4 * std::log(2.0);
  EXPECT_DOUBLE_EQ(evaluation.perplexity(), 2.0);
  EXPECT_DOUBLE_EQ(evaluation.bits_per_byte(8), 0.5);
  LayerHistogram layer{.tokens_with = {0, 5, 0, 4, 1}};
  EXPECT_EQ(layer.tokens(), 10);
  EXPECT_DOUBLE_EQ(layer.mean(), 2.1);
  EXPECT_EQ(layer.quantile(0.5), 1);
  EXPECT_EQ(layer.quantile(0.51), 3);
  EXPECT_EQ(layer.quantile(0.9), 3);
  EXPECT_EQ(layer.max(), 4);
}

TEST(Evaluate, RefusesImpossibleWindows) {
  Context ctx(1);
  const auto model = test_model(ctx, kSmallVocab);
  ScorerCpu scorer(ctx, *model);
  EXPECT_THROW(Evaluator(scorer, {.length = 49}), InputError);
  EXPECT_THROW(Evaluator(scorer, {.length = -1}), InputError);
  EXPECT_THROW(Evaluator(scorer, {.length = 8, .stride = 9}), InputError);
  EXPECT_THROW(Evaluator(scorer, {.stride = -2}), InputError);
  EXPECT_THROW(Evaluator(scorer, {.batch_tokens = -1}), InputError);
}

}  // namespace
}  // namespace twell
