// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/session_cpu.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "twell/base/error.h"
#include "twell/infer/generate.h"
#include "twell/infer/test_model.h"

namespace twell {
namespace {

double max_abs(std::span<const float> values) {
  double result = 0.0;
  for (const float value : values) result = std::max(result, std::abs(static_cast<double>(value)));
  return result;
}

// The sums differ only in their order: a few hundred roundings of logits of this size.
void expect_close(std::span<const float> a, std::span<const float> b) {
  ASSERT_EQ(a.size(), b.size());
  const double tolerance = 512 * 1.2e-7 * std::max(max_abs(a), 1.0);
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], tolerance) << "token " << i;
}

TEST(Session, PiecewiseEqualsAtOnce) {
  Context ctx(2);
  const auto model = test_model(ctx, kVocab);
  const std::vector<int32_t> ids = random_ids(40, kVocab, 3);
  SessionCpu whole(ctx, *model, {});
  const auto at_once = whole.append(0, ids);
  const std::vector<float> expected(at_once.begin(), at_once.end());

  SessionCpu pieces(ctx, *model, {});
  std::span<const float> got;
  for (size_t begin = 0, size = 1; begin < ids.size(); begin += size, size = 2 * size) {
    const size_t count = std::min(size, ids.size() - begin);
    got = pieces.append(0, std::span(ids).subspan(begin, count));
  }
  EXPECT_EQ(pieces.length(0), 40);
  expect_close(expected, got);
}

// Passes of a few tokens, and more logits than are computed together.
TEST(Session, PassesAndBlocksOfLogitsEqualStepByStep) {
  Context ctx(2);
  ModelConfig config = test_model(ctx, kVocab)->config;
  config.context = 200;
  Model model(config);
  init_weights(ctx, model, 1);
  const std::vector<int32_t> ids = random_ids(190, kVocab, 3);
  SessionCpu steps(ctx, model, {});
  std::vector<std::vector<float>> want;
  for (size_t i = 0; i < ids.size(); ++i) {
    const std::span<const float> row = steps.append(0, std::span(ids).subspan(i, 1));
    want.emplace_back(row.begin(), row.end());
  }
  for (const int64_t prefill : {0, 7, 100}) {
    SCOPED_TRACE(testing::Message() << "passes of " << prefill);
    SessionCpu session(ctx, model, {.slots = 2, .prefill_tokens = prefill});
    expect_close(session.append(1, ids), want.back());
    size_t seen = 0;
    session.append_logits(0, ids, [&](int64_t first, ConstMatrixF rows) {
      ASSERT_EQ(first, static_cast<int64_t>(seen));
      for (int64_t row = 0; row < rows.rows; ++row, ++seen) {
        expect_close({rows.row(row), static_cast<size_t>(rows.cols)}, want[seen]);
      }
    });
    EXPECT_EQ(seen, ids.size());
    // Scores of the tokens after each, and the logits after the last, from which is drawn.
    std::vector<TokenLogProbs> scores;
    const NewTokens tokens{.slot = 1,
                           .ids = ids,
                           .targets = std::span(ids).subspan(1),
                           .vocab = kVocab,
                           .scores = &scores};
    session.clear(1);
    const Draw greedy{.sampler = {.temperature = 0.0f}, .vocab = kVocab};
    int32_t next = kNoToken;
    session.drawn(session.append_and_draw({&tokens, 1}, {&greedy, 1}), {&next, 1});
    ASSERT_EQ(scores.size(), ids.size() - 1);
    for (size_t i = 0; i < scores.size(); ++i) {
      const TokenLogProbs score = token_log_probs(want[i], ids[i + 1], 0, kVocab);
      EXPECT_NEAR(scores[i].token.log_prob, score.token.log_prob, 1e-3) << i;
    }
    EXPECT_EQ(next, sample(want.back(), greedy.sampler, 0, 0));
  }
}

// Keys and values are off by at most 1/254 of the largest of their head, so logits by about a
// percent of their size in this model of two layers.
TEST(Session, EightBitCacheIsClose) {
  Context ctx(2);
  const auto model = test_model(ctx, kVocab);
  const std::vector<int32_t> ids = random_ids(40, kVocab, 3);
  SessionCpu exact(ctx, *model, {});
  SessionCpu eight(ctx, *model, {.cache = {.eight_bits = true}});
  double error = 0.0, size = 0.0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto want = exact.append(0, std::span(ids).subspan(i, 1));
    const auto got = eight.append(0, std::span(ids).subspan(i, 1));
    for (size_t j = 0; j < want.size(); ++j) {
      error += std::pow(static_cast<double>(got[j]) - want[j], 2);
      size += std::pow(static_cast<double>(want[j]), 2);
    }
  }
  EXPECT_LE(std::sqrt(error / size), 0.02);
  EXPECT_GT(error, 0.0);
}

TEST(Session, SlotsAreIndependent) {
  Context ctx(2);
  const auto model = test_model(ctx, kVocab);
  const std::vector<int32_t> a = random_ids(9, kVocab, 4), b = random_ids(17, kVocab, 5);
  SessionCpu session(ctx, *model, {.slots = 3});
  session.append(2, a);
  session.append(0, b);
  const std::vector<int64_t> slots = {0, 2};
  const std::vector<int32_t> next = {7, 8};
  const ConstMatrixF both = session.decode(slots, next);
  const std::vector<float> first(both.row(0), both.row(0) + kVocab);
  const std::vector<float> second(both.row(1), both.row(1) + kVocab);

  SessionCpu alone(ctx, *model, {});
  alone.append(0, b);
  expect_close(first, alone.append(0, std::span(next).subspan(0, 1)));
  alone.clear(0);
  EXPECT_EQ(alone.length(0), 0);
  alone.append(0, a);
  expect_close(second, alone.append(0, std::span(next).subspan(1, 1)));
}

// Keys and values of a sequence that was cancelled may be NaN, and stay where they are.
TEST(Session, WhatASequenceLeavesBehindReachesNoOther) {
  Context ctx(2);
  constexpr int32_t kNan = 9;
  const auto model = model_with_nan(ctx, kVocab, kNan);
  std::vector<int32_t> bad = random_ids(48, kVocab, 1);
  bad[0] = kNan;
  for (const bool eight_bits : {false, true}) {
    SCOPED_TRACE(eight_bits);
    const SessionOptions options{.slots = 2,
                                 .cache = {.block_tokens = 16, .eight_bits = eight_bits}};
    const auto logits = [&](bool after_bad) {
      SessionCpu session(ctx, *model, options);
      if (after_bad) {
        for (const int64_t slot : {0, 1}) {
          EXPECT_TRUE(std::isnan(session.append(slot, bad)[0]));
          session.clear(slot);
        }
      }
      std::vector<float> all;
      for (const int64_t slot : {0, 1}) {
        std::vector<int32_t> ids = random_ids(slot == 0 ? 21 : 5, kVocab, 7);
        for (int32_t& id : ids) id = id == kNan ? kNan + 1 : id;
        const std::span<const float> row = session.append(slot, ids);
        all.insert(all.end(), row.begin(), row.end());
      }
      const std::vector<int64_t> slots = {0, 1};
      const ConstMatrixF rows = session.decode(slots, std::vector<int32_t>{3, 4});
      all.insert(all.end(), rows.data, rows.data + rows.rows * rows.cols);
      return all;
    };
    const std::vector<float> want = logits(false);
    EXPECT_TRUE(std::ranges::all_of(want, [](float value) { return std::isfinite(value); }));
    EXPECT_EQ(logits(true), want);
  }
}

TEST(Session, RefusesWhatDoesNotFit) {
  Context ctx(1);
  const auto model = test_model(ctx, kVocab);
  EXPECT_THROW(SessionCpu(ctx, *model, {.slots = 0}), InputError);
  EXPECT_THROW(SessionCpu(ctx, *model, {.capacity = 49}), InputError);
  // A sequence has at most the blocks that there are.
  const KvFormat format{.block_tokens = 16};
  const int64_t block = KvCache::block_bytes(model->config, format);
  EXPECT_EQ(SessionCpu(ctx, *model, {.cache_bytes = 2 * block, .cache = format}).capacity(), 32);
  SessionCpu session(ctx, *model, {.capacity = 10});
  session.append(0, random_ids(10, kVocab, 1));
  EXPECT_THROW(session.append(0, random_ids(1, kVocab, 1)), InputError);
  EXPECT_THROW(session.append(0, {}), InputError);
}

TEST(Generate, RepeatsWithTheSameSeedAndStreamsItsText) {
  Context ctx(2);
  const auto model = test_model(ctx, kVocab);
  const Tokenizer tokenizer = byte_tokenizer();
  SessionCpu session(ctx, *model, {});
  std::string streamed;
  GenerateOptions options{.max_tokens = 20, .sampler = {.seed = 5}};
  options.on_text = [&](std::string_view text) { streamed += text; };
  const Generation first = generate(session, tokenizer, "abc", options);
  EXPECT_EQ(first.text, streamed);
  EXPECT_EQ(first.prompt_tokens, 3);
  const Generation second = generate(session, tokenizer, "abc", options);
  EXPECT_EQ(first.ids, second.ids);
  options.sampler.seed = 6;
  EXPECT_NE(generate(session, tokenizer, "abc", options).ids, first.ids);
}

TEST(Generate, SparseExecutionsGiveTheSameGreedyTokens) {
  Context ctx(2);
  const auto model = test_model(ctx, kVocab);
  const Tokenizer tokenizer = byte_tokenizer();
  const GenerateOptions options{.max_tokens = 30, .sampler = {.temperature = 0.0f}};
  std::vector<std::vector<int32_t>> ids;
  for (const FfnPolicy policy :
       {FfnPolicy::kDense, FfnPolicy::kRowFused, FfnPolicy::kTileUnion, FfnPolicy::kAuto}) {
    SessionCpu session(ctx, *model, {.ffn = policy});
    ids.push_back(generate(session, tokenizer, "hello", options).ids);
  }
  for (const auto& other : ids) EXPECT_EQ(other, ids.front());
}

TEST(Generate, StopsForEachReason) {
  Context ctx(1);
  const auto model = test_model(ctx, kVocab);
  const Tokenizer tokenizer = byte_tokenizer();
  SessionCpu session(ctx, *model, {});
  GenerateOptions options{.max_tokens = 5, .sampler = {.temperature = 0.0f}};
  const Generation limited = generate(session, tokenizer, "x", options);
  if (limited.reason == StopReason::kMaxTokens) {
    EXPECT_EQ(limited.ids.size(), 5u);
  } else {
    EXPECT_EQ(limited.reason, StopReason::kEndOfText);
  }

  options.max_tokens = 1000;
  options.sampler = {.top_k = 256, .seed = 11};
  const Generation full = generate(session, tokenizer, "x", options);
  if (full.reason == StopReason::kContextFull) {
    // The prompt of one token and the new ones are the context's.
    EXPECT_EQ(static_cast<int64_t>(full.ids.size()), model->config.context - 1);
  } else {
    EXPECT_EQ(full.reason, StopReason::kEndOfText);
  }

  std::atomic<bool> cancel{false};
  options.cancel = &cancel;
  options.on_text = [&](std::string_view) { cancel = true; };
  const Generation cancelled = generate(session, tokenizer, "x", options);
  EXPECT_EQ(cancelled.reason, StopReason::kCancelled);
  EXPECT_GE(cancelled.ids.size(), 1u);
  EXPECT_LT(cancelled.ids.size(), full.ids.size());

  EXPECT_THROW(generate(session, tokenizer, std::string(48, 'x'), options), InputError);
  options.max_tokens = 0;
  EXPECT_THROW(generate(session, tokenizer, "x", options), InputError);
}

}  // namespace
}  // namespace twell
