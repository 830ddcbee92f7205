// SPDX-License-Identifier: Apache-2.0
// The scheduler's policy on a session without a model, whose next token is a function of the
// sequence alone.
#include "twell/infer/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <random>
#include <thread>

#include "twell/base/error.h"
#include "twell/base/rng.h"
#include "twell/infer/test_filter.h"
#include "twell/tokenizer/test_tokenizer.h"

namespace twell {
namespace {

constexpr int32_t kScriptedVocab = 256;

// What follows these tokens. Every 16th seed draws no token at times. Every third repeats itself
// for a while, as long as a token is not there too often.
int32_t free_next_of(const std::vector<int32_t>& ids, const Draw& draw) {
  if (draw.sampler.seed % 3 == 0 && draw.index % 23 != 22) {
    const int32_t last = ids.back();
    const auto seen = std::ranges::find(draw.seen, last, &SeenToken::id);
    const int32_t times = seen == draw.seen.end() ? 0 : seen->times;
    return (5 * (last / 5) + (last + 1 + times / 4) % 5) % kScriptedVocab;
  }
  uint64_t hash = draw.sampler.seed;
  for (const int32_t id : ids) hash = hash * 31 + static_cast<uint64_t>(id);
  for (const SeenToken& seen : draw.seen) {
    hash = hash * 31 + static_cast<uint64_t>(seen.id * 100 + seen.times);
  }
  const auto next =
      static_cast<int32_t>(uniform_below(hash, draw.stream, draw.index, kScriptedVocab));
  return draw.sampler.seed % 16 == 15 && next % 16 == 0 ? kNoToken : next;
}

// The same, or the next token after it that the draw's filter allows.
int32_t next_of(const std::vector<int32_t>& ids, const Draw& draw) {
  const int32_t next = free_next_of(ids, draw);
  if (draw.filter == nullptr || next == kNoToken) return next;
  std::vector<uint32_t> mask(static_cast<size_t>(token_mask_words(kScriptedVocab)));
  draw.filter->allowed(mask);
  for (int32_t i = 0; i < kScriptedVocab; ++i) {
    const int32_t id = (next + i) % kScriptedVocab;
    if (mask_allows(mask, id)) return id;
  }
  return kNoToken;
}

// Keeps the tokens themselves in the blocks of its cache, and reads them back for every draw. Knows
// what a call draws at once, but tells it only when asked.
class FakeSession : public Session {
 public:
  FakeSession(int64_t slots, int64_t capacity, int64_t blocks, int64_t block_tokens,
              int64_t prefill_tokens, int64_t ahead = 0, int64_t draft_tokens = 0)
      : Session({slots, capacity, blocks, block_tokens, draft_tokens}),
        ahead_(ahead),
        tables_(static_cast<size_t>(slots)),
        memory_(static_cast<size_t>(blocks * block_tokens), -1),
        prefill_tokens_(prefill_tokens) {
    config_.vocab_size = kScriptedVocab;
    config_.context = capacity;
  }

  std::span<const float> append(int64_t slot, std::span<const int32_t> ids) override {
    write(slot, ids);
    appended(slot, ids);
    return logits_;
  }
  ConstMatrixF decode(std::span<const int64_t>, std::span<const int32_t>) override { return {}; }
  int64_t append_and_draw(std::span<const NewTokens> tokens, std::span<const Draw> draws) override {
    make_room(tokens, draws);
    std::vector<int32_t> next;
    for (size_t i = 0; i < tokens.size(); ++i) {
      const auto& [slot, ids, drafts, targets, top, vocab, scores] = tokens[i];
      passed += std::ssize(ids);
      std::vector<int32_t> known(ids.begin(), ids.end());
      if (ids[0] < 0) {
        EXPECT_EQ(calls_.back().call, begun_) << "the call before is known";
        const int32_t drawn = calls_.back().next.at(static_cast<size_t>(-1 - ids[0]));
        known[0] = std::max(drawn, 0);
        const Draw& draw = draws[next.size()];
        if (draw.filter != nullptr && drawn != kNoToken) draw.filter->accept(draw.index - 1, drawn);
      }
      write(slot, known);
      for (const int32_t target : targets) {
        scores->push_back(token_log_probs(logits_, target, top, kScriptedVocab));
      }
      next.push_back(next_of(read(slot, length(slot) + std::ssize(ids)), draws[next.size()]));
      known.insert(known.end(), drafts.begin(), drafts.end());
      write(slot, known);
      for (int64_t draft = 1; draft <= std::ssize(drafts); ++draft) {
        next.push_back(next_of(read(slot, length(slot) + 1 + draft), draws[next.size()]));
      }
    }
    appended(begun_ + 1, tokens);
    return begin(std::move(next));
  }
  void drawn(int64_t call, std::span<int32_t> next) override {
    while (!calls_.empty() && calls_.front().call < call) calls_.pop_front();
    ASSERT_FALSE(calls_.empty());
    ASSERT_EQ(calls_.front().call, call);
    ASSERT_EQ(calls_.front().next.size(), next.size());
    std::ranges::copy(calls_.front().next, next.begin());
    calls_.pop_front();
    known(call, next);
    if (!calls_.empty()) ++overlapped;
  }
  int64_t draws_ahead() const override { return ahead_; }
  int64_t drafts_of_step(int64_t drafts) const override { return drafts - drafts % draft_unit; }
  double step_cost(int64_t rows) const override { return 1.0 + 0.01 * static_cast<double>(rows); }
  void append_logits(int64_t, std::span<const int32_t>, const OnLogits&) override {}
  TokenLogProbs drawn_log_probs(int64_t) override {
    return token_log_probs(logits_, 0, 0, kScriptedVocab);
  }
  std::vector<ActiveNeurons> active_neurons() const override { return {}; }
  int64_t prefill_tokens() const override { return prefill_tokens_; }
  const ModelConfig& config() const override { return config_; }

  int64_t draft_unit = 1;        // calls take multiples of it
  int64_t passed = 0;            // tokens
  int64_t overlapped = 0;        // calls that were asked when the next one had begun
  int64_t fail_after = -1;       // calls that draw; negative: never
  int64_t fail_show_after = -1;  // changes of a sequence's blocks; negative: never

 private:
  void show(int64_t slot, std::span<const int32_t> table, int64_t) override {
    if (fail_show_after >= 0 && fail_show_after-- == 0) throw Error("the device is gone");
    tables_[static_cast<size_t>(slot)].assign(table.begin(), table.end());
  }
  int32_t& at(int64_t slot, int64_t position) {
    const int64_t block_tokens = cache_use().block_tokens;
    const int32_t block =
        tables_[static_cast<size_t>(slot)][static_cast<size_t>(position / block_tokens)];
    return memory_[static_cast<size_t>(block * block_tokens + position % block_tokens)];
  }
  int64_t begin(std::vector<int32_t> next) {
    if (fail_after >= 0 && fail_after-- == 0) throw Error("the device is gone");
    calls_.push_back({++begun_, std::move(next)});
    return begun_;
  }
  void write(int64_t slot, std::span<const int32_t> ids) {
    for (size_t i = 0; i < ids.size(); ++i) {
      at(slot, length(slot) + static_cast<int64_t>(i)) = ids[i];
    }
  }
  std::vector<int32_t> read(int64_t slot, int64_t count) {
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < count; ++i) ids.push_back(at(slot, i));
    return ids;
  }

  struct Call {
    int64_t call = 0;
    std::vector<int32_t> next;
  };
  int64_t ahead_;
  int64_t begun_ = 0;
  std::deque<Call> calls_;  // that have not been asked
  std::vector<std::vector<int32_t>> tables_;
  std::vector<int32_t> memory_;
  ModelConfig config_;
  int64_t prefill_tokens_;
  std::vector<float> logits_ = std::vector<float>(kScriptedVocab);
};

struct TimedEvents {
  std::vector<int32_t> ids;
  std::optional<StopReason> stop;
  Usage usage;
  int64_t ends = 0, first_at = -1;  // first_at: step of the first token

  void hear(const GenerationEvent& event, int64_t time) {
    EXPECT_EQ(ends, 0) << "an event after the last";
    if (event.token >= 0 && first_at < 0) first_at = time;
    if (event.token >= 0) ids.push_back(event.token);
    usage = event.usage;
    stop = event.stop;
    ends += event.stop.has_value();
  }
};

class SchedulerTest : public testing::Test {
 protected:
  GenerationRequest request(std::vector<int32_t> prompt, int64_t max_tokens, TimedEvents& heard,
                            uint64_t seed = 0) {
    return {
        .prompt = std::move(prompt),
        .sampler = {.seed = seed},
        .max_tokens = max_tokens,
        .stop_at_end_of_text = false,
        .on_event = [this, &heard](const GenerationEvent& event) { heard.hear(event, steps_); }};
  }
  static std::unique_ptr<TokenFilter> filter_of(uint64_t seed) {
    return std::make_unique<HashFilter>(kScriptedVocab, seed);
  }
  struct Alone {
    std::vector<int32_t> ids;
    StopReason stop;
  };
  // What the request gives alone.
  static Alone alone(const GenerationRequest& asked, int64_t capacity) {
    std::vector<int32_t> ids = asked.prompt, out;
    std::vector<SeenToken> seen;
    const auto see = [&](int32_t id, int32_t times) {
      if (!asked.sampler.penalizes()) return;
      auto at = std::ranges::find(seen, id, &SeenToken::id);
      if (at == seen.end()) at = seen.insert(at, {.id = id});
      at->times += times;
    };
    for (const int32_t id : ids) see(id, 0);
    std::unique_ptr<TokenFilter> filter;
    if (asked.filter) filter = filter_of(asked.sampler.seed);
    while (std::ssize(out) < asked.max_tokens && std::ssize(ids) < capacity) {
      const int32_t next = next_of(
          ids,
          {.sampler = asked.sampler, .index = out.size(), .seen = seen, .filter = filter.get()});
      if (next == kNoToken) return {out, StopReason::kNotFinite};
      if (filter) filter->accept(out.size(), next);
      if (std::ranges::count(asked.stop_tokens, next) > 0) return {out, StopReason::kEndOfText};
      out.push_back(next);
      ids.push_back(next);
      see(next, 1);
    }
    const bool enough = std::ssize(out) == asked.max_tokens;
    return {out, enough ? StopReason::kMaxTokens : StopReason::kContextFull};
  }
  static std::vector<int32_t> expected(const GenerationRequest& asked, int64_t capacity) {
    return alone(asked, capacity).ids;
  }
  static std::vector<int32_t> counting(int32_t first, int64_t count) {
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < count; ++i)
      ids.push_back((first + static_cast<int32_t>(i)) % kScriptedVocab);
    return ids;
  }

  Tokenizer tokenizer_ = byte_tokenizer();
  int64_t steps_ = 0;  // counted by the tests that compare times
};

// Requests of all lengths with common beginnings, in caches that are too small for them, some with
// stop tokens, penalties or filters, some without a finite output, some cancelled: every answer is
// the one that the request gives alone, also from a session that computes ahead. Half of the
// schedulers guess tokens.
TEST_F(SchedulerTest, RandomCrowdsGiveWhatEachGivesAlone) {
  int64_t preemptions = 0, cached = 0, overlapped = 0, drafted = 0, accepted = 0;
  std::vector<int64_t> ended(kStopReasons);
  for (uint64_t seed = 0; seed < 32; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const auto below = [&](int64_t n) {
      return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
    };
    const bool several = seed % 4 >= 2;  // clients
    const int64_t block = 1 + below(6), capacity = 20 + below(40);
    const int64_t least = (capacity + block - 1) / block;
    FakeSession session(1 + below(8), capacity, least + below(2 * least), block, 1 + below(20),
                        /*ahead=*/static_cast<int64_t>(seed % 2), /*draft_tokens=*/20);
    const int64_t most = seed % 8 < 4 ? 0 : 1 + below(20);
    Scheduler scheduler(session, tokenizer_, {.speculate = most});
    constexpr size_t kRequests = 80;
    std::vector<TimedEvents> heard(kRequests);
    std::vector<GenerationRequest> asked;
    size_t submitted = 0;
    bool going = true;
    while (submitted < kRequests || going) {
      for (int64_t i = below(4); i > 0 && submitted < kRequests; --i, ++submitted) {
        std::vector<int32_t> prompt = counting(static_cast<int32_t>(below(2)), below(capacity - 1));
        prompt.push_back(static_cast<int32_t>(below(kScriptedVocab)));
        asked.push_back(request(prompt, 1 + below(30), heard[submitted], submitted));
        if (submitted % 4 == 1) asked.back().stop_tokens = counting(20, 20);
        if (submitted % 8 == 2) asked.back().sampler.presence_penalty = 1.0f;
        if (submitted % 5 == 0) asked.back().filter = filter_of(submitted);
        if (several) asked.back().client = below(3);
        EXPECT_EQ(scheduler.submit(asked.back()), static_cast<int64_t>(submitted));
      }
      if (below(10) == 0) scheduler.cancel(below(kRequests));
      going = scheduler.step();
      ++steps_;
    }
    EXPECT_FALSE(scheduler.step());
    int64_t last_first = -1;
    for (size_t i = 0; i < kRequests; ++i) {
      ASSERT_EQ(heard[i].ends, 1) << i;
      const auto [want, reason] = alone(asked[i], capacity);
      ++ended[static_cast<size_t>(*heard[i].stop)];
      EXPECT_EQ(heard[i].usage.tokens, std::ssize(heard[i].ids));
      if (heard[i].stop == StopReason::kCancelled) {
        ASSERT_LE(heard[i].ids.size(), want.size());
        EXPECT_TRUE(std::equal(heard[i].ids.begin(), heard[i].ids.end(), want.begin()));
      } else {
        EXPECT_EQ(heard[i].ids, want) << i;
        EXPECT_EQ(heard[i].stop, reason) << i;
        if (want.empty() || several) continue;
        // Nobody overtakes: first tokens come in order of arrival.
        EXPECT_GE(heard[i].first_at, last_first) << i;
        last_first = heard[i].first_at;
      }
    }
    const SchedulerStats stats = scheduler.stats();
    EXPECT_EQ(stats.cache.used, 0);
    EXPECT_EQ(stats.waiting + stats.running, 0);
    EXPECT_LT(stats.prompt_tokens, session.passed);
    preemptions += stats.preemptions;
    cached += stats.cached_tokens;
    overlapped += session.overlapped;
    if (seed % 2 == 0) {
      EXPECT_EQ(session.overlapped, 0);
    }
    drafted += stats.drafted;
    accepted += stats.accepted;
    int64_t heard_accepted = 0;
    for (const TimedEvents& one : heard) heard_accepted += one.usage.accepted;
    EXPECT_EQ(heard_accepted, stats.accepted);
    if (most == 0) {
      EXPECT_EQ(stats.drafted, 0);
    }
  }
  EXPECT_GT(accepted, 750);
  EXPECT_GT(drafted, accepted + 50);
  EXPECT_GT(preemptions, 50);
  EXPECT_GT(cached, 500);
  EXPECT_GT(overlapped, 500);
  for (const StopReason reason :
       {StopReason::kCancelled, StopReason::kEndOfText, StopReason::kMaxTokens,
        StopReason::kContextFull, StopReason::kNotFinite}) {
    EXPECT_GT(ended[static_cast<size_t>(reason)], 25) << stop_reason_name(reason);
  }
}

// A session that computes ahead begins a step before it is asked for the tokens of the last. Limits
// are known in advance; an end that depends on the token costs one token on the device.
TEST_F(SchedulerTest, ComputesAheadOfItsReports) {
  FakeSession session(2, 64, 32, 4, 64, /*ahead=*/1);
  Scheduler scheduler(session, tokenizer_);
  TimedEvents limited, full, stopped;
  std::vector<GenerationRequest> asked = {request(counting(1, 8), 20, limited),
                                          request(counting(5, 60), 20, full)};
  for (const GenerationRequest& one : asked) scheduler.submit(one);
  while (scheduler.step()) {
  }
  EXPECT_EQ(limited.ids, expected(asked[0], 64));
  EXPECT_EQ(full.ids, expected(asked[1], 64));
  EXPECT_EQ(full.stop, StopReason::kContextFull);
  EXPECT_EQ(session.passed, 8 + 60 + 19 + 3);
  EXPECT_EQ(session.overlapped, 20 - 1);  // all passes but the last

  GenerationRequest stops = asked[0];
  stops.stop_tokens = {limited.ids[9]};
  stops.on_event = [&](const GenerationEvent& event) { stopped.hear(event, 0); };
  const int64_t passed = session.passed, fed = scheduler.stats().prompt_tokens;
  scheduler.submit(stops);
  while (scheduler.step()) {
  }
  EXPECT_EQ(stopped.ids, expected(stops, 64));
  EXPECT_EQ(stopped.stop, StopReason::kEndOfText);
  EXPECT_EQ(session.passed - passed,
            scheduler.stats().prompt_tokens - fed + std::ssize(stopped.ids) + 1);
  EXPECT_EQ(session.cache_use().used, 0);
}

// A text that repeats itself takes few steps, and blocks behind wrong guesses are given back.
TEST_F(SchedulerTest, GuessedTokensSaveSteps) {
  for (const int64_t ahead : {0, 1}) {
    FakeSession session(2, 256, 128, 4, 64, ahead, /*draft_tokens=*/16);
    Scheduler scheduler(session, tokenizer_, {.speculate = 16});
    TimedEvents repeats, wanders;
    const std::vector<GenerationRequest> asked = {request(counting(1, 8), 100, repeats, 3),
                                                  request(counting(1, 8), 100, wanders, 4)};
    scheduler.submit(asked[0]);
    while (scheduler.step()) {
      EXPECT_LE(session.cache_use().used * 4, 8 + std::ssize(repeats.ids) + 4);
    }
    EXPECT_EQ(repeats.ids, expected(asked[0], 256));
    const int64_t steps = scheduler.stats().steps;
    EXPECT_LT(steps, 60);
    EXPECT_GT(repeats.usage.accepted, 45);
    scheduler.submit(asked[1]);
    while (scheduler.step()) {
    }
    EXPECT_EQ(wanders.ids, expected(asked[1], 256));
    EXPECT_GT(scheduler.stats().steps - steps, 95);
  }
  // Sequences together guess no more than the session takes.
  FakeSession units(3, 256, 128, 4, 128, 0, /*draft_tokens=*/16);
  units.draft_unit = 5;
  Scheduler together(units, tokenizer_, {.speculate = 16});
  std::array<TimedEvents, 3> events;
  std::vector<GenerationRequest> all;
  for (int i = 0; i < 3; ++i)
    all.push_back(request(counting(1 + i, 8), 100, events[static_cast<size_t>(i)], 3));
  for (const GenerationRequest& one : all) together.submit(one);
  while (together.step()) {
  }
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(events[i].ids, expected(all[i], 256));
  EXPECT_GT(together.stats().accepted, 45);
  EXPECT_EQ(together.stats().drafted % 5, 0);
  FakeSession session(2, 256, 128, 4, 64, 0, 4);
  EXPECT_THROW(Scheduler(session, tokenizer_, {.speculate = -1}), InputError);
  EXPECT_THROW(Scheduler(session, tokenizer_, {.speculate = 65}), InputError);
}

// A filter that allows nothing ends its request alone, one that says so ends it like an end of
// text.
TEST_F(SchedulerTest, FiltersEndTheirRequests) {
  class Ending final : public TokenFilter {
   public:
    explicit Ending(uint64_t length) : length_(length) {}
    void accept(uint64_t index, int32_t) override { told_ = index + 1; }
    void rewind(uint64_t index) override { told_ = std::min(told_, index); }
    void allowed(std::span<uint32_t> mask) override {
      std::ranges::fill(mask, told_ < 5 ? ~0u : 0u);
    }
    bool ended() const override { return told_ == length_; }

   private:
    uint64_t length_, told_ = 0;
  };
  for (const int64_t ahead : {0, 1}) {
    FakeSession session(3, 64, 64, 4, 64, ahead);
    Scheduler scheduler(session, tokenizer_);
    TimedEvents ends, stuck, free;
    GenerationRequest one = request(counting(1, 4), 20, ends),
                      two = request(counting(9, 4), 20, stuck);
    one.filter = std::make_shared<Ending>(3);
    two.filter = std::make_shared<Ending>(100);
    scheduler.submit(one);
    scheduler.submit(two);
    scheduler.submit(request(counting(3, 4), 20, free));
    while (scheduler.step()) {
    }
    EXPECT_EQ(ends.ids.size(), 3u);
    EXPECT_EQ(ends.stop, StopReason::kEndOfText);
    EXPECT_EQ(stuck.ids.size(), 5u);
    EXPECT_EQ(stuck.stop, StopReason::kNoneFits);
    EXPECT_EQ(free.ids.size(), 20u);
  }
}

TEST_F(SchedulerTest, APromptNeverDelaysOthersByMoreThanItsPieces) {
  FakeSession session(4, 1000, 100, 16, 512);
  Scheduler scheduler(session, tokenizer_, {.prefill_tokens = 32});
  TimedEvents running[2], big;
  for (TimedEvents& heard : running) scheduler.submit(request(counting(3, 5), 100, heard));
  scheduler.step();
  EXPECT_EQ(session.passed, 10);
  scheduler.submit(request(counting(7, 500), 3, big));
  for (int64_t step = 1; step <= 17; ++step) {
    const int64_t passed = session.passed;
    scheduler.step();
    EXPECT_EQ(session.passed - passed, step < 17 ? 32 : 2 + 500 - 16 * 30);
    EXPECT_EQ(std::ssize(running[0].ids), 1 + step);
  }
  EXPECT_EQ(big.ids.size(), 1u);
  EXPECT_EQ(scheduler.stats().prompt_tokens, 510);
}

// Sequences that grow leave prompts at least half of a step.
TEST_F(SchedulerTest, PromptsAreNotStarvedByThoseThatGrow) {
  FakeSession session(10, 1000, 700, 16, 8);
  Scheduler scheduler(session, tokenizer_);
  TimedEvents running[9], big;
  for (TimedEvents& heard : running) scheduler.submit(request(counting(3, 1), 100, heard));
  while (session.passed < 9 + 8) scheduler.step();  // 8 in the first step, 4 beside them
  scheduler.submit(request(counting(7, 20), 3, big));
  for (int64_t step = 0; step < 5; ++step) {
    const int64_t passed = session.passed;
    scheduler.step();
    EXPECT_EQ(session.passed - passed, 9 + 4);
  }
  EXPECT_EQ(big.ids.size(), 1u);
}

// A prompt that loses its place while it is scored is scored again, and told of once.
TEST_F(SchedulerTest, ScoresOfAPreemptedPromptAreThoseOfItsTokens) {
  int64_t preemptions = 0;
  for (int64_t blocks = 11; blocks <= 15; ++blocks) {
    FakeSession session(2, 40, blocks, 4, 2);
    Scheduler scheduler(session, tokenizer_);
    TimedEvents oldest;
    scheduler.submit(request(counting(1, 8), 30, oldest));
    while (oldest.ids.size() < 3) scheduler.step();
    std::vector<int32_t> scored;
    GenerationRequest asked{.prompt = counting(100, 34), .max_tokens = 2};
    asked.stop_at_end_of_text = false;
    asked.prompt_log_probs = 0;
    asked.on_event = [&](const GenerationEvent& event) {
      for (const TokenLogProbs& one : event.prompt_log_probs) scored.push_back(one.token.id);
    };
    scheduler.submit(asked);
    while (scheduler.step()) {
    }
    preemptions += scheduler.stats().preemptions;
    EXPECT_EQ(scored, std::vector<int32_t>(asked.prompt.begin() + 1, asked.prompt.end())) << blocks;
  }
  EXPECT_GT(preemptions, 0);
}

// Prompts whose last block is that of the whole context need no further one to grow.
TEST_F(SchedulerTest, SequencesThatFillTheCacheExactlyRunTogether) {
  FakeSession session(2, 16, 8, 4, 64);
  Scheduler scheduler(session, tokenizer_);
  TimedEvents first, second;
  const std::vector<GenerationRequest> asked = {request(counting(1, 14), 2, first),
                                                request(counting(100, 14), 2, second)};
  for (const GenerationRequest& one : asked) scheduler.submit(one);
  scheduler.step();
  EXPECT_EQ(scheduler.stats().running, 2);
  while (scheduler.step()) {
  }
  EXPECT_EQ(first.ids, expected(asked[0], 16));
  EXPECT_EQ(second.ids, expected(asked[1], 16));
  EXPECT_EQ(scheduler.stats().preemptions, 0);
}

TEST_F(SchedulerTest, TheYoungestIsPreemptedAndComesNext) {
  FakeSession session(3, 40, 10, 4, 64);
  Scheduler scheduler(session, tokenizer_);
  TimedEvents oldest, youngest, waiting;
  std::vector<GenerationRequest> asked = {request(counting(1, 8), 30, oldest),
                                          request(counting(100, 8), 16, youngest),
                                          request(counting(200, 8), 2, waiting)};
  scheduler.submit(asked[0]);
  scheduler.submit(asked[1]);
  int64_t steps = 0;
  while (scheduler.stats().preemptions == 0) {
    scheduler.step();
    ASSERT_EQ(std::ssize(oldest.ids), ++steps);  // never delayed
  }
  EXPECT_EQ(youngest.ends, 0);
  EXPECT_EQ(scheduler.stats().waiting, 1);
  scheduler.submit(asked[2]);  // behind the preempted one, though it would fit
  while (scheduler.step()) {
    EXPECT_TRUE(waiting.ids.empty() || youngest.ids.size() == 16u || youngest.ids.size() > 10u);
  }
  EXPECT_EQ(oldest.ids, expected(asked[0], 40));
  EXPECT_EQ(youngest.ids, expected(asked[1], 40));
  EXPECT_EQ(waiting.ids, expected(asked[2], 40));
}

// A client with a hundred sequences holds all slots and the whole cache; another's single token
// comes within a few steps, from a slot that the first gives up and gets back.
TEST_F(SchedulerTest, ClientsTakeTurns) {
  for (const int64_t blocks : {400, 70}) {  // room for all slots, and for four of them
    SCOPED_TRACE(blocks);
    FakeSession session(16, 100, blocks, 4, 64);
    Scheduler scheduler(session, tokenizer_);
    std::vector<TimedEvents> many(100);
    std::vector<GenerationRequest> asked;
    for (size_t i = 0; i < many.size(); ++i) {
      asked.push_back(request(counting(1, 20), 70, many[i], i));
      asked.back().client = 1;
    }
    scheduler.submit(asked);
    for (int i = 0; i < 40; ++i) scheduler.step();
    for (uint64_t client = 2; client < 5; ++client) {
      TimedEvents single;
      GenerationRequest one = request(counting(50, 5), 1, single);
      one.client = client;
      scheduler.submit(one);
      for (int i = 0; i < 3; ++i) scheduler.step();
      EXPECT_EQ(single.ids, expected(one, 100));
    }
    while (scheduler.step()) {
    }
    for (size_t i = 0; i < many.size(); ++i) EXPECT_EQ(many[i].ids, expected(asked[i], 100));
  }
}

TEST_F(SchedulerTest, ClientsShareThePromptTokensOfAStep) {
  FakeSession session(8, 1000, 700, 16, 512);
  Scheduler scheduler(session, tokenizer_, {.prefill_tokens = 30});
  TimedEvents big[3], small[2];
  for (TimedEvents& heard : big) scheduler.submit(request(counting(7, 500), 1, heard));
  scheduler.step();
  for (uint64_t i = 0; i < 2; ++i) {
    GenerationRequest one = request(counting(9, 5), 1, small[i]);
    one.client = 1 + i;
    scheduler.submit(one);
  }
  scheduler.step();
  EXPECT_EQ(small[0].ids.size() + small[1].ids.size(), 2u);
  EXPECT_EQ(session.passed, 60);  // the rest is the first client's
  while (scheduler.step()) {
  }
  EXPECT_EQ(big[2].ids.size(), 1u);
}

TEST_F(SchedulerTest, AFullQueueHasRoomForClientsWithNothingInIt) {
  FakeSession session(1, 64, 32, 4, 64);
  Scheduler scheduler(session, tokenizer_, {.max_waiting = 32});
  TimedEvents heard;
  const auto submit = [&](uint64_t client, size_t count) {
    GenerationRequest one = request(counting(1, 4), 2, heard);
    one.on_event = nullptr;
    one.client = client;
    std::vector<GenerationRequest> all(count, one);
    return scheduler.submit(std::move(all)).has_value();
  };
  EXPECT_FALSE(submit(1, 35));
  EXPECT_TRUE(submit(1, 32));
  EXPECT_FALSE(submit(1, 1));
  EXPECT_FALSE(submit(2, 3));
  EXPECT_TRUE(submit(2, 1));
  EXPECT_FALSE(submit(2, 1));
  EXPECT_TRUE(submit(3, 1));
  EXPECT_FALSE(submit(4, 1));
  while (scheduler.step()) {
  }
  EXPECT_EQ(scheduler.stats().ended[static_cast<size_t>(StopReason::kMaxTokens)], 34);
}

TEST_F(SchedulerTest, SharesBeginningsOnlyWhereAsked) {
  FakeSession session(1, 64, 32, 4, 64);
  Scheduler scheduler(session, tokenizer_);
  std::vector<int64_t> cached;
  for (const bool share : {true, true, false, true}) {
    TimedEvents heard;
    GenerationRequest asked = request(counting(1, 21), 3, heard);
    asked.share_beginning = share;
    scheduler.submit(asked);
    while (scheduler.step()) {
    }
    EXPECT_EQ(heard.ids, expected(asked, 64));
    cached.push_back(heard.usage.cached_tokens);
  }
  EXPECT_EQ(cached, (std::vector<int64_t>{0, 20, 0, 20}));
  EXPECT_EQ(scheduler.stats().cached_tokens, 40);
}

class SchedulerAheadTest : public SchedulerTest, public testing::WithParamInterface<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Ahead, SchedulerAheadTest, testing::Values(0, 1));

TEST_P(SchedulerAheadTest, CancellingTakesEffectWithinAStep) {
  FakeSession session(2, 64, 32, 4, 64, GetParam());
  Scheduler scheduler(session, tokenizer_);
  TimedEvents heard, other;
  GenerationRequest asked = request(counting(1, 4), 50, heard);
  const auto inner = asked.on_event;
  asked.on_event = [&](const GenerationEvent& event) {
    inner(event);
    if (heard.ids.size() == 5) scheduler.cancel(event.request);  // as a closed connection would
  };
  scheduler.submit(asked);
  scheduler.submit(request(counting(1, 4), 20, other));
  while (scheduler.step()) {
  }
  EXPECT_EQ(heard.stop, StopReason::kCancelled);
  EXPECT_EQ(heard.ids.size(), 5u);
  EXPECT_EQ(other.ids.size(), 20u);
  scheduler.cancel(0);   // has ended
  scheduler.cancel(77);  // never was
}

TEST_P(SchedulerAheadTest, AFailureOfTheSessionEndsEveryRequest) {
  for (int64_t calls = 0; calls < 9; ++calls) {
    SCOPED_TRACE(calls);
    FakeSession session(2, 64, 32, 4, 64, GetParam());
    Scheduler scheduler(session, tokenizer_);
    TimedEvents heard[4];
    for (TimedEvents& one : heard) scheduler.submit(request(counting(1, 4), 5, one));
    session.fail_after = calls;
    EXPECT_THROW(while (scheduler.step()){}, Error);
    for (const TimedEvents& one : heard) EXPECT_EQ(one.ends, 1);
    EXPECT_EQ(heard[3].stop, StopReason::kFailed);
    EXPECT_EQ(scheduler.stats().running + scheduler.stats().waiting, 0);
    EXPECT_EQ(session.cache_use().used, 0);
    TimedEvents after;
    const GenerationRequest again = request(counting(1, 4), 5, after);
    scheduler.submit(again);  // what works again is used again
    while (scheduler.step()) {
    }
    EXPECT_EQ(after.ids, expected(again, 64));
  }
}

// Wherever the session throws (a sequence starts, grows, is preempted or ends), every request hears
// of its end once, and cancelling it afterwards is harmless.
TEST_P(SchedulerAheadTest, NoRequestIsLostWhereverTheSessionFails) {
  int64_t failures = 0;
  for (int64_t after = 0; after < 40; ++after) {
    FakeSession session(3, 64, 12, 4, 8, GetParam());
    session.fail_show_after = after;
    Scheduler scheduler(session, tokenizer_);
    TimedEvents heard[5];
    for (TimedEvents& one : heard) scheduler.submit(request(counting(1, 6), 9, one));
    try {
      while (scheduler.step()) {
      }
    } catch (const Error&) {
      ++failures;
    }
    for (const TimedEvents& one : heard) EXPECT_EQ(one.ends, 1) << "after " << after;
    for (int64_t number = 0; number < 5; ++number) scheduler.cancel(number);
    EXPECT_FALSE(scheduler.step());
  }
  EXPECT_GE(failures, 20);
}

// Threads submit, cancel and look at the statistics while the engine thread runs.
TEST_P(SchedulerAheadTest, ThreadsGetTheirOwnAnswers) {
  constexpr int kThreads = 6, kEach = 200;
  FakeSession session(5, 60, 30, 4, 16, GetParam());
  Scheduler scheduler(session, tokenizer_, {.max_waiting = 40});
  std::thread engine([&] { scheduler.run(); });
  std::vector<TimedEvents> heard(kThreads * kEach);
  std::vector<GenerationRequest> asked(heard.size());
  std::atomic<int64_t> refused = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = t * kEach; i < (t + 1) * kEach; ++i) {
        const auto at = static_cast<size_t>(i);
        asked[at] =
            request(counting(i % 3, 1 + i % 50), 1 + i % 20, heard[at], static_cast<uint64_t>(i));
        std::optional<int64_t> number;
        while (!(number = scheduler.submit(asked[at]))) {
          ++refused;
          std::this_thread::yield();
        }
        if (i % 7 == 0) scheduler.cancel(*number);
        const SchedulerStats stats = scheduler.stats();
        EXPECT_LE(stats.running, 5);
        EXPECT_LE(stats.waiting, 46);  // 40, and those preempted
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  scheduler.drain();
  engine.join();
  EXPECT_EQ(scheduler.stats().refused, refused);
  for (size_t i = 0; i < heard.size(); ++i) {
    ASSERT_EQ(heard[i].ends, 1) << i;
    if (heard[i].stop == StopReason::kCancelled) {
      EXPECT_EQ(i % 7, 0u);
    } else {
      EXPECT_EQ(heard[i].ids, expected(asked[i], 60)) << i;
    }
  }
}

TEST(Histogram, CountsByUpperBound) {
  Histogram histogram({1.0, 2.0});
  for (const double value : {0.5, 1.0, 1.5, 9.0}) histogram.add(value);
  EXPECT_EQ(histogram.counts, (std::vector<int64_t>{2, 1, 1}));
  EXPECT_EQ(histogram.count(), 4);
  EXPECT_DOUBLE_EQ(histogram.sum, 12.0);
}

}  // namespace
}  // namespace twell
