// SPDX-License-Identifier: Apache-2.0
// The scheduler on a small model.
#include "twell/infer/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <thread>

#include "twell/base/error.h"
#include "twell/infer/generate.h"
#include "twell/infer/session_cpu.h"
#include "twell/infer/test_model.h"
#include "twell/model/scorer_cpu.h"

namespace twell {
namespace {

// What a request's events told.
struct Heard {
  std::vector<int32_t> ids;
  std::string text;
  std::vector<TokenLogProbs> log_probs, prompt_log_probs;
  std::optional<StopReason> stop;
  Usage usage;
  int64_t ends = 0;

  void hear(const GenerationEvent& event) {
    EXPECT_EQ(ends, 0) << "an event after the last";
    if (event.token >= 0) ids.push_back(event.token);
    text += event.text;
    if (event.log_probs != nullptr) log_probs.push_back(*event.log_probs);
    prompt_log_probs.insert(prompt_log_probs.end(), event.prompt_log_probs.begin(),
                            event.prompt_log_probs.end());
    usage = event.usage;
    stop = event.stop;
    ends += event.stop.has_value();
  }
};

class SchedulerCpuTest : public testing::Test {
 protected:
  static GenerationRequest request(std::vector<int32_t> prompt, int64_t max_tokens, Heard& heard) {
    return {.prompt = std::move(prompt),
            .sampler = {.temperature = 0.0f},
            .max_tokens = max_tokens,
            .stop_at_end_of_text = false,
            .on_event = [&heard](const GenerationEvent& event) { heard.hear(event); }};
  }
  static void finish(Scheduler& scheduler) {
    while (scheduler.step()) {
    }
  }

  Context ctx_{2};
  std::unique_ptr<Model> model_ = test_model(ctx_, kVocab);
  Tokenizer tokenizer_ = byte_tokenizer();
};

TEST_F(SchedulerCpuTest, LogProbsEqualTheScorers) {
  SessionCpu session(ctx_, *model_, {.slots = 2, .prefill_tokens = 5});
  Scheduler scheduler(session, tokenizer_);
  const std::vector<int32_t> prompt = random_ids(17, kVocab, 1);
  Heard heard, other;
  GenerationRequest asked = request(prompt, 8, heard);
  asked.log_probs = 20;
  asked.prompt_log_probs = 3;
  scheduler.submit(asked);
  scheduler.submit(request(random_ids(9, kVocab, 2), 8, other));
  finish(scheduler);
  ASSERT_EQ(heard.log_probs.size(), heard.ids.size());
  ASSERT_EQ(heard.prompt_log_probs.size(), prompt.size() - 1);

  std::vector<int32_t> ids = prompt;
  ids.insert(ids.end(), heard.ids.begin(), heard.ids.end());
  const std::vector<int32_t> targets(ids.begin() + 1, ids.end());
  ids.pop_back();
  std::vector<int64_t> rows(ids.size());
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(i);
  ScorerCpu scorer(ctx_, *model_);
  std::vector<float> losses(ids.size());
  const ForwardSequence sequence{.tokens = std::ssize(ids)};
  scorer.score({.ids = ids, .sequences = {&sequence, 1}, .rows = rows, .targets = targets}, losses);
  std::vector<TokenLogProbs> got = heard.prompt_log_probs;
  got.insert(got.end(), heard.log_probs.begin(), heard.log_probs.end());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].token.id, targets[i]);
    EXPECT_NEAR(got[i].token.log_prob, -losses[i], 1e-4) << i;
    const size_t top = i + 1 < prompt.size() ? 3 : 20;
    ASSERT_EQ(got[i].top.size(), top);
    for (size_t j = 1; j < top; ++j) EXPECT_LE(got[i].top[j].log_prob, got[i].top[j - 1].log_prob);
    if (top == 20) {
      EXPECT_EQ(got[i].top[0].id, targets[i]);  // greedy
    }
  }

  // Scoring alone draws nothing and does not feed the last token, so a prompt may have one token
  // more than the context.
  Heard scored;
  GenerationRequest echo = request(random_ids(model_->config.context + 1, kVocab, 1), 0, scored);
  echo.prompt_log_probs = 0;
  scheduler.submit(echo);
  finish(scheduler);
  EXPECT_TRUE(scored.ids.empty());
  EXPECT_EQ(scored.stop, StopReason::kMaxTokens);
  ASSERT_EQ(std::ssize(scored.prompt_log_probs), model_->config.context);
  for (size_t i = 0; i + 1 < prompt.size(); ++i) {
    EXPECT_NEAR(scored.prompt_log_probs[i].token.log_prob, got[i].token.log_prob, 1e-4);
    EXPECT_TRUE(scored.prompt_log_probs[i].top.empty());
  }
  echo.prompt.push_back(0);
  EXPECT_THROW(scheduler.submit(echo), InputError);
}

TEST_F(SchedulerCpuTest, StopsAtStringsAndTokensWithoutReportingThem) {
  SessionCpu session(ctx_, *model_, {});
  Scheduler scheduler(session, tokenizer_);
  Heard all, cut, stopped;
  scheduler.submit(request({1, 2, 3}, 12, all));
  finish(scheduler);
  ASSERT_EQ(all.ids.size(), 12u);
  GenerationRequest asked = request({1, 2, 3}, 12, stopped);
  asked.stop_tokens = {all.ids[7]};
  scheduler.submit(asked);
  finish(scheduler);
  const auto first = std::find(all.ids.begin(), all.ids.end(), all.ids[7]);
  EXPECT_EQ(stopped.ids, std::vector<int32_t>(all.ids.begin(), first));
  EXPECT_EQ(stopped.stop, StopReason::kEndOfText);
  asked = request({1, 2, 3}, 12, cut);
  asked.stop_strings = {all.text.substr(all.text.size() / 2, 2)};
  scheduler.submit(asked);
  finish(scheduler);
  EXPECT_EQ(cut.text, all.text.substr(0, all.text.find(asked.stop_strings[0])));
  EXPECT_EQ(cut.stop, StopReason::kStopString);
}

TEST_F(SchedulerCpuTest, OutputThatIsNotFiniteEndsItsRequestAlone) {
  constexpr int32_t kNan = 50;
  const auto model = model_with_nan(ctx_, kVocab, kNan);
  const SessionOptions options{.slots = 4, .cache = {.block_tokens = 16}};
  std::vector<int32_t> bad = random_ids(20, 40, 1);
  bad[3] = kNan;
  const std::vector<std::vector<int32_t>> good = {random_ids(5, 40, 2), random_ids(20, 40, 3)};
  std::vector<Heard> alone(2), together(2), failed(4);
  for (size_t i = 0; i < 2; ++i) {
    SessionCpu session(ctx_, *model, options);
    Scheduler scheduler(session, tokenizer_);
    scheduler.submit(request(good[i], 12, alone[i]));
    finish(scheduler);
    EXPECT_EQ(alone[i].stop, StopReason::kMaxTokens);
  }
  SessionCpu session(ctx_, *model, options);
  Scheduler scheduler(session, tokenizer_);
  scheduler.submit(request(good[0], 12, together[0]));
  scheduler.submit(request(bad, 12, failed[0]));
  GenerationRequest scored = request(bad, 12, failed[1]);
  scored.log_probs = scored.prompt_log_probs = 2;
  scheduler.submit(scored);
  GenerationRequest only_scores = request(bad, 0, failed[2]);
  only_scores.prompt_log_probs = 0;
  scheduler.submit(only_scores);
  scheduler.submit(request(good[1], 12, together[1]));
  finish(scheduler);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(together[i].ids, alone[i].ids);
    EXPECT_EQ(together[i].stop, StopReason::kMaxTokens);
  }
  // Its keys and values are not shared either.
  scheduler.submit(request(bad, 12, failed[3]));
  finish(scheduler);
  for (const Heard& heard : failed) {
    EXPECT_EQ(heard.stop, StopReason::kNotFinite);
    EXPECT_EQ(heard.ends, 1);
    EXPECT_TRUE(heard.ids.empty());
    EXPECT_EQ(heard.usage.cached_tokens, 0);
  }
  EXPECT_EQ(scheduler.stats().cache.used, 0);
  EXPECT_THROW(generate(session, tokenizer_, tokenizer_.token_bytes(kNan), {}), InputError);
}

// A penalty that no logit makes up for lets no token come twice, also across a preemption.
TEST_F(SchedulerCpuTest, PenaltiesCountPromptAndNewText) {
  SessionCpu session(ctx_, *model_, {.slots = 2});
  Scheduler scheduler(session, tokenizer_);
  std::vector<Heard> heard(2);
  const std::vector<int32_t> prompt = random_ids(10, kVocab, 5);
  GenerationRequest present = request(prompt, 20, heard[0]);
  present.sampler.presence_penalty = 1e6f;
  scheduler.submit(present);
  GenerationRequest repeated = request(prompt, 20, heard[1]);
  repeated.sampler.presence_penalty = 1e6f;
  repeated.sampler.repetition_penalty = 1e6f;
  repeated.log_probs = 3;
  scheduler.submit(repeated);
  finish(scheduler);
  for (const Heard& one : heard) {
    const std::set<int32_t> different(one.ids.begin(), one.ids.end());
    EXPECT_EQ(different.size(), one.ids.size());
  }
  // Log-probabilities are those of the model.
  SessionCpu judge(ctx_, *model_, {});
  const std::span<const float> logits = judge.append(0, prompt);
  const TokenLogProbs want = token_log_probs(logits, heard[1].ids[0], 3, kVocab - 1);
  EXPECT_EQ(heard[1].log_probs[0].token.id, want.token.id);
  EXPECT_NEAR(heard[1].log_probs[0].token.log_prob, want.token.log_prob, 1e-5);
}

TEST_F(SchedulerCpuTest, BiasesFavourAndAvoidTokens) {
  SessionCpu session(ctx_, *model_, {.slots = 2});
  Scheduler scheduler(session, tokenizer_);
  const std::vector<int32_t> prompt = random_ids(10, kVocab, 5);
  Heard plain, avoiding, favouring;
  scheduler.submit(request(prompt, 12, plain));
  finish(scheduler);
  GenerationRequest avoids = request(prompt, 12, avoiding);
  for (const int32_t id : std::set<int32_t>(plain.ids.begin(), plain.ids.end())) {
    avoids.logit_bias.push_back({id, -kMostBias});
  }
  avoids.log_probs = 3;
  scheduler.submit(avoids);
  GenerationRequest favours = request(prompt, 12, favouring);
  favours.logit_bias = {{7, kMostBias}};
  favours.sampler = {.temperature = 1.0f, .frequency_penalty = 50.0f, .seed = 3};
  scheduler.submit(favours);
  finish(scheduler);
  EXPECT_EQ(avoiding.ids.size(), 12u);
  for (const int32_t id : avoiding.ids) {
    EXPECT_EQ(std::ranges::count(plain.ids, id), 0) << id;
  }
  // Log-probabilities are those of the model.
  SessionCpu judge(ctx_, *model_, {});
  const TokenLogProbs want =
      token_log_probs(judge.append(0, prompt), avoiding.ids[0], 3, kVocab - 1);
  EXPECT_EQ(avoiding.log_probs[0].top[0].id, plain.ids[0]);
  EXPECT_NEAR(avoiding.log_probs[0].token.log_prob, want.token.log_prob, 1e-5);
  // Penalties count a biased token too.
  EXPECT_EQ(favouring.ids[0], 7);
  EXPECT_EQ(favouring.ids[1], 7);
  EXPECT_LE(std::ranges::count(favouring.ids, 7), 3);

  GenerationRequest wrong = request(prompt, 1, plain);
  wrong.logit_bias = {{kVocab, 1.0f}};
  EXPECT_THROW(scheduler.submit(wrong), InputError);
  wrong.logit_bias = {{1, 101.0f}};
  EXPECT_THROW(scheduler.submit(wrong), InputError);
  wrong.logit_bias = {{1, 1.0f}, {1, 1.0f}};
  EXPECT_THROW(scheduler.submit(wrong), InputError);
  wrong.logit_bias.clear();
  for (int64_t i = 0; i <= kMostBiases; ++i) wrong.logit_bias.push_back({1, 1.0f});
  EXPECT_THROW(scheduler.submit(wrong), InputError);
}

// Texts with guessed tokens are those without, greedy ones and sampled ones, of sequences alone and
// together, with penalties, biases, stop strings and ends within guesses.
TEST_F(SchedulerCpuTest, GuessedTokensChangeNoText) {
  constexpr int64_t kRequests = 48;
  int64_t accepted = 0, drafted = 0;
  std::vector<Heard> heard[2];
  for (const int64_t speculate : {0, 7}) {
    auto& all = heard[speculate > 0];
    all.resize(kRequests);
    SessionCpu session(
        ctx_, *model_,
        {.slots = 3, .prefill_tokens = 9, .draft_tokens = 10, .cache = {.block_tokens = 16}});
    Scheduler scheduler(session, tokenizer_, {.speculate = speculate});
    for (int64_t i = 0; i < kRequests; ++i) {
      // Prompts that repeat themselves, and a temperature that often follows them.
      std::vector<int32_t> prompt = random_ids(3 + i % 3, kVocab, static_cast<uint64_t>(i % 7));
      const std::vector<int32_t> once = prompt;
      for (int64_t j = 0; j < i % 4; ++j) prompt.insert(prompt.end(), once.begin(), once.end());
      GenerationRequest asked = request(prompt, 3 + i, all[static_cast<size_t>(i)]);
      asked.sampler = {.temperature = i % 3 == 0   ? 0.0f
                                      : i % 3 == 1 ? 0.1f
                                                   : 0.6f,
                       .seed = static_cast<uint64_t>(i)};
      if (i % 5 == 1) asked.sampler.frequency_penalty = 0.1f;
      // Texts of a few different tokens.
      if (i % 2 == 1) asked.logit_bias = {{prompt[0], 30.0f}, {prompt[1], 30.0f}, {7, 30.0f}};
      if (i % 4 == 1) asked.log_probs = 2;
      if (i % 6 == 5) asked.stop_tokens = random_ids(20, kVocab, 9);
      if (i % 8 == 3) asked.stop_strings = {"a", "e"};
      scheduler.submit(asked);
    }
    finish(scheduler);
    EXPECT_EQ(scheduler.stats().cache.used, 0);
    accepted += scheduler.stats().accepted;
    drafted += scheduler.stats().drafted;
  }
  for (size_t i = 0; i < kRequests; ++i) {
    const Heard &without = heard[0][i], &with = heard[1][i];
    EXPECT_EQ(with.ids, without.ids) << i;
    EXPECT_EQ(with.text, without.text) << i;
    EXPECT_EQ(with.stop, without.stop) << i;
    ASSERT_EQ(with.log_probs.size(), without.log_probs.size()) << i;
    for (size_t j = 0; j < with.log_probs.size(); ++j) {
      EXPECT_EQ(with.log_probs[j].token.id, without.log_probs[j].token.id);
      EXPECT_NEAR(with.log_probs[j].token.log_prob, without.log_probs[j].token.log_prob, 1e-4);
    }
  }
  EXPECT_GT(accepted, 50);
  EXPECT_GT(drafted, accepted);
}

TEST_F(SchedulerCpuTest, TakesAListInItsOrder) {
  SessionCpu session(ctx_, *model_, {.slots = 2, .capacity = 10});
  Scheduler scheduler(session, tokenizer_, {.max_waiting = 3});
  Heard alone[3], together[3];
  std::vector<GenerationRequest> list;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(scheduler.submit(request({i, 1}, 3 + i, alone[i])), i);
    list.push_back(request({i, 1}, 3 + i, together[i]));
  }
  finish(scheduler);
  EXPECT_EQ(scheduler.submit(std::move(list)), 3);
  EXPECT_EQ(scheduler.stats().waiting, 3);
  scheduler.cancel(4);  // the second of the list
  finish(scheduler);
  EXPECT_EQ(together[0].ids, alone[0].ids);
  EXPECT_EQ(together[1].stop, StopReason::kCancelled);
  EXPECT_EQ(together[2].ids, alone[2].ids);
  EXPECT_EQ(scheduler.stats().submitted, 6);
}

TEST_F(SchedulerCpuTest, RefusesWhatItCannotTake) {
  SessionCpu session(ctx_, *model_, {.slots = 1, .capacity = 10});
  Scheduler scheduler(session, tokenizer_, {.max_waiting = 2});
  Heard heard[4];
  EXPECT_EQ(scheduler.submit(request({1}, 3, heard[0])), 0);
  scheduler.step();  // takes the slot
  EXPECT_EQ(scheduler.submit(request({1}, 3, heard[1])), 1);
  const auto together = [&](std::vector<int32_t> first, std::vector<int32_t> second) {
    std::vector<GenerationRequest> both;
    both.push_back(request(std::move(first), 3, heard[3]));
    both.push_back(request(std::move(second), 3, heard[3]));
    return scheduler.submit(std::move(both));
  };
  EXPECT_EQ(together({1}, {1}), std::nullopt);  // there is room for one of them
  EXPECT_THROW(together({1}, {kVocab}), InputError);
  EXPECT_EQ(scheduler.stats().waiting, 1);
  EXPECT_EQ(scheduler.stats().refused, 2);
  EXPECT_EQ(scheduler.submit(request({1}, 3, heard[2])), 2);
  EXPECT_EQ(scheduler.submit(request({1}, 3, heard[3])), std::nullopt);
  EXPECT_EQ(scheduler.stats().waiting, 2);
  EXPECT_EQ(scheduler.stats().running, 1);
  EXPECT_EQ(scheduler.stats().refused, 3);
  finish(scheduler);
  EXPECT_THROW(scheduler.submit(request({}, 3, heard[3])), InputError);
  EXPECT_THROW(scheduler.submit(request({kVocab}, 3, heard[3])), InputError);
  EXPECT_THROW(scheduler.submit(request({-1}, 3, heard[3])), InputError);
  EXPECT_THROW(scheduler.submit(request({1}, 0, heard[3])), InputError);
  EXPECT_THROW(scheduler.submit(request(random_ids(10, kVocab, 1), 1, heard[3])), InputError);
  GenerationRequest asked = request({1}, 1, heard[3]);
  asked.log_probs = 21;
  EXPECT_THROW(scheduler.submit(asked), InputError);
  scheduler.drain();
  EXPECT_EQ(scheduler.submit(request({1}, 3, heard[3])), std::nullopt);
  EXPECT_EQ(heard[3].ends, 0);
  const SchedulerStats stats = scheduler.stats();
  EXPECT_EQ(stats.submitted, 3);
  EXPECT_EQ(stats.tokens, heard[0].usage.tokens + heard[1].usage.tokens + heard[2].usage.tokens);
  EXPECT_EQ(stats.prompt_tokens, 3);
  EXPECT_EQ(stats.first_token_seconds.count(), 3);
  EXPECT_EQ(stats.request_seconds.count(), 3);
  EXPECT_EQ(stats.layers.size(), 2u);
}

// Threads submit and cancel while the engine thread runs; every answer that was not cancelled is
// the one that generate() gives.
TEST_F(SchedulerCpuTest, AnswersThreadsWithWhatEachGivesAlone) {
  constexpr int kThreads = 4, kEach = 12;
  // Three full sequences would need nine blocks.
  SessionCpu session(ctx_, *model_,
                     {.slots = 3,
                      .prefill_tokens = 7,
                      .cache_bytes = 4 * KvCache::block_bytes(model_->config, {.block_tokens = 16}),
                      .cache = {.block_tokens = 16}});
  Scheduler scheduler(session, tokenizer_);
  std::thread engine([&] { scheduler.run(); });
  std::vector<Heard> heard(kThreads * kEach);
  const auto asked_of = [&](int i) {
    // Half of the prompts begin with the same 16 tokens.
    std::vector<int32_t> prompt = random_ids(i % 2 * 16, kVocab, 1);
    for (const int32_t id : random_ids(1 + i * 5 % 13, kVocab, static_cast<uint64_t>(i))) {
      prompt.push_back(id);
    }
    GenerationRequest asked = request(prompt, 20 + i * 7 % 15, heard[static_cast<size_t>(i)]);
    asked.sampler = {
        .temperature = i % 3 == 0 ? 0.0f : 0.9f, .top_k = 40, .seed = static_cast<uint64_t>(i)};
    return asked;
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = t * kEach; i < (t + 1) * kEach; ++i) {
        const int64_t number = scheduler.submit(asked_of(i)).value();
        if (i % 5 == 1) scheduler.cancel(number);
        EXPECT_GE(scheduler.stats().submitted, i - t * kEach);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  scheduler.drain();
  engine.join();
  const std::vector<Heard> crowd = std::move(heard);
  heard.assign(crowd.size(), {});
  SessionCpu alone(ctx_, *model_, {});
  int64_t cancelled = 0;
  for (int i = 0; i < kThreads * kEach; ++i) {
    Scheduler one(alone, tokenizer_);
    one.submit(asked_of(i));
    finish(one);
    const Heard &got = crowd[static_cast<size_t>(i)], &want = heard[static_cast<size_t>(i)];
    EXPECT_EQ(got.ends, 1);
    if (got.stop == StopReason::kCancelled) {
      ++cancelled;
      EXPECT_EQ(i % 5, 1);
      ASSERT_LE(got.ids.size(), want.ids.size());
      EXPECT_TRUE(std::equal(got.ids.begin(), got.ids.end(), want.ids.begin()));
    } else {
      EXPECT_EQ(got.ids, want.ids) << i;
      EXPECT_EQ(got.text, want.text);
      EXPECT_EQ(got.stop, want.stop);
    }
  }
  const SchedulerStats stats = scheduler.stats();
  EXPECT_EQ(stats.ended[static_cast<size_t>(StopReason::kCancelled)], cancelled);
  EXPECT_GT(stats.preemptions, 0);
  EXPECT_GT(stats.cached_tokens, 0);
  EXPECT_EQ(stats.cache.blocks, 4);
  EXPECT_EQ(stats.cache.used, 0);
}

}  // namespace
}  // namespace twell
