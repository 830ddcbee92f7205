// SPDX-License-Identifier: Apache-2.0
// The sequences that one HTTP request waits for: the engine thread adds their events, the thread of
// the connection takes them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "twell/infer/scheduler.h"
#include "twell/serve/memory_budget.h"
#include "twell/serve/waker.h"

namespace twell {

// A copy of a GenerationEvent that lives on.
struct AnswerEvent {
  size_t sequence = 0;  // in the order of submission
  int32_t token = -1;
  std::string text;
  std::optional<TokenLogProbs> log_probs;
  std::vector<TokenLogProbs> prompt_log_probs;
  std::optional<StopReason> stop;
  Usage usage;
};

// Used by one thread.
class Answers {
 public:
  // The budget holds the prompts, and the events until they are taken, or as long as this object
  // lives where `keeps_events`. All arguments must outlive the engine thread.
  Answers(Scheduler& scheduler, Waker& waker, MemoryBudget& budget, bool keeps_events)
      : scheduler_(scheduler),
        waker_(waker),
        prompts_(budget),
        mailbox_(std::make_shared<Mailbox>(budget)),
        keeps_events_(keeps_events) {}
  // Cancels the sequences that have not ended.
  ~Answers();
  Answers(const Answers&) = delete;
  Answers& operator=(const Answers&) = delete;

  // Adds a sequence to those that submit() hands over. False when the budget is used up.
  bool add(GenerationRequest request);
  // Hands the added sequences to the scheduler, which takes all of them or none. False when it has
  // no room for them or drains. InputError as for Scheduler::submit().
  bool submit();
  // Waits for events, at most so long, and returns those that are new, in order.
  std::vector<AnswerEvent> take(std::chrono::milliseconds at_most);
  // Whether events were lost because the budget was used up. Nothing more arrives then.
  bool overflowed() const;
  // Whether every event of every sequence has been taken.
  bool done() const { return ended_ == submitted_; }

 private:
  struct Mailbox {
    explicit Mailbox(MemoryBudget& budget) : share(budget) {}

    std::mutex mutex;  // guards what follows
    std::condition_variable arrived;
    std::vector<AnswerEvent> events;
    MemoryBudget::Share share;
    int64_t waiting_bytes = 0;  // of `events`
    bool overflowed = false;    // or nobody takes events any more
  };

  Scheduler& scheduler_;
  Waker& waker_;
  MemoryBudget::Share prompts_;
  std::shared_ptr<Mailbox> mailbox_;  // the engine thread may add to it after our end
  bool keeps_events_;
  std::vector<GenerationRequest> added_;  // not yet handed over
  size_t submitted_ = 0;
  int64_t first_request_ = 0;  // the scheduler's number of the first one
  size_t ended_ = 0;
};

}  // namespace twell
