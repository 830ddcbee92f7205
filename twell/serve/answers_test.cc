// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/answers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>

#include "twell/infer/session_cpu.h"
#include "twell/infer/test_model.h"
#include "twell/tokenizer/test_tokenizer.h"

namespace twell {
namespace {

constexpr int64_t kVocabulary = 257;

class AnswersTest : public testing::Test {
 protected:
  GenerationRequest request(int64_t max_tokens) const {
    return {.prompt = {1, 2, 3}, .max_tokens = max_tokens, .stop_at_end_of_text = false};
  }
  void run() {
    while (scheduler_.step()) {
    }
  }
  int64_t cancelled() const {
    return scheduler_.stats().ended[static_cast<size_t>(StopReason::kCancelled)];
  }

  Context context_{1};
  std::shared_ptr<const Model> model_ = test_model(context_, kVocabulary);
  Tokenizer tokenizer_ = byte_tokenizer();
  SessionCpu session_{context_, *model_, {.slots = 4}};
  Scheduler scheduler_{session_, tokenizer_};
  Waker waker_;
};

// A stream gives back what its events took as they are taken, so that its length has no limit; a
// whole answer holds all of it to its end.
TEST_F(AnswersTest, AStreamHoldsOnlyEventsThatWait) {
  for (const bool stream : {true, false}) {
    MemoryBudget memory(1 << 20);
    {
      Answers answers(scheduler_, waker_, memory, stream);
      ASSERT_TRUE(answers.add(request(20)));
      const int64_t prompt = memory.used();
      ASSERT_TRUE(answers.submit());
      size_t events = 0;
      int64_t held = 0;
      while (!answers.done()) {
        scheduler_.step();
        const int64_t before = memory.used();
        const size_t taken = answers.take().size();
        events += taken;
        if (taken == 0) continue;
        EXPECT_GT(before, prompt);
        EXPECT_EQ(memory.used() == prompt, stream);
        EXPECT_GE(memory.used(), held);
        held = stream ? 0 : memory.used();
      }
      EXPECT_EQ(events, 20u);
      run();
    }
    EXPECT_EQ(memory.used(), 0);
  }
}

// An event with the log-probabilities of a prompt takes as much as they do: at least 512 bytes for
// each token that is named, two of the prompt with two others each.
TEST_F(AnswersTest, LogProbabilitiesOfPromptsCount) {
  std::vector<int64_t> held;
  for (const bool scored : {false, true}) {
    MemoryBudget memory(1 << 20);
    Answers answers(scheduler_, waker_, memory, false);
    GenerationRequest asked = request(1);
    if (scored) asked.prompt_log_probs = 2;
    ASSERT_TRUE(answers.add(std::move(asked)));
    ASSERT_TRUE(answers.submit());
    run();
    held.push_back(memory.used());
    EXPECT_EQ(answers.take()[0].prompt_log_probs.size(), scored ? 2u : 0u);
  }
  EXPECT_GE(held[1] - held[0], 2 * 3 * 512);
}

// A budget for one event at a time carries a stream of any length, and not a whole answer.
TEST_F(AnswersTest, OverflowsWhenTheBudgetIsUsedUp) {
  for (const bool stream : {true, false}) {
    MemoryBudget memory(600);
    Answers answers(scheduler_, waker_, memory, stream);
    ASSERT_TRUE(answers.add(request(20)));
    ASSERT_TRUE(answers.submit());
    for (int i = 0; i < 40 && !answers.done(); ++i) {
      scheduler_.step();
      answers.take();
    }
    EXPECT_EQ(answers.overflowed(), !stream);
    EXPECT_EQ(answers.done(), stream);
    run();
  }
  MemoryBudget memory(20);
  Answers answers(scheduler_, waker_, memory, true);
  EXPECT_FALSE(answers.add(request(1)));
}

// Every sequence, the last one too.
TEST_F(AnswersTest, TheEndCancelsWhatRuns) {
  MemoryBudget memory(1 << 20);
  int64_t before = 0;
  for (const int64_t count : {1, 2, 3, 6}) {
    {
      Answers answers(scheduler_, waker_, memory, true);
      for (int64_t i = 0; i < count; ++i) ASSERT_TRUE(answers.add(request(50)));
      ASSERT_TRUE(answers.submit());
      scheduler_.step();
    }
    run();
    EXPECT_EQ(cancelled() - before, count);
    before = cancelled();
    EXPECT_EQ(memory.used(), 0);
  }
  {
    Answers answers(scheduler_, waker_, memory, true);
    ASSERT_TRUE(answers.add(request(2)));
    ASSERT_TRUE(answers.submit());
    run();
    answers.take();
    EXPECT_TRUE(answers.done());
  }
  EXPECT_EQ(cancelled(), before);
}

TEST_F(AnswersTest, TellsWhenThereIsSomethingToTake) {
  for (const bool stream : {true, false}) {
    MemoryBudget memory(1 << 20);
    std::atomic<int> told = 0;
    {
      Answers answers(scheduler_, waker_, memory, stream);
      for (int i = 0; i < 2; ++i) ASSERT_TRUE(answers.add(request(5 + 5 * i)));
      ASSERT_TRUE(answers.submit());
      answers.notify([&] { ++told; });
      EXPECT_EQ(told, 0);
      run();
      while (told == 0) std::this_thread::yield();
      EXPECT_EQ(answers.take().size(), 15u);
      EXPECT_TRUE(answers.done());
    }
    EXPECT_EQ(told, 1) << "once until the events are taken";
    // What is there already is told at once.
    Answers late(scheduler_, waker_, memory, stream);
    ASSERT_TRUE(late.add(request(3)));
    ASSERT_TRUE(late.submit());
    run();
    late.notify([&] { ++told; });
    EXPECT_GE(told, 2);
  }
}

TEST_F(AnswersTest, TellsOfAFailureAtOnce) {
  MemoryBudget memory(1 << 20);
  Answers answers(scheduler_, waker_, memory, false);
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(answers.add(request(50)));
  ASSERT_TRUE(answers.submit());
  std::atomic<bool> told = false;
  answers.notify([&] { told = true; });
  scheduler_.step();
  EXPECT_FALSE(told);
  scheduler_.cancel_all();
  scheduler_.step();
  while (!told) std::this_thread::yield();
  run();
}

}  // namespace
}  // namespace twell
