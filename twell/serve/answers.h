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

// Used by one thread. The number of events that wait is bounded by the tokens of the answers.
class Answers {
 public:
  explicit Answers(Scheduler& scheduler)
      : scheduler_(scheduler), mailbox_(std::make_shared<Mailbox>()) {}
  // Cancels the sequences that have not ended.
  ~Answers();
  Answers(const Answers&) = delete;
  Answers& operator=(const Answers&) = delete;

  // False when the scheduler is full or drains. InputError as for Scheduler::submit().
  bool submit(GenerationRequest request);
  // Waits for events, at most so long, and returns those that are new, in order.
  std::vector<AnswerEvent> take(std::chrono::milliseconds at_most);
  // Whether every event of every sequence has been taken.
  bool done() const { return ended_ == requests_.size(); }

 private:
  struct Mailbox {
    std::mutex mutex;
    std::condition_variable arrived;
    std::vector<AnswerEvent> events;
  };

  Scheduler& scheduler_;
  std::shared_ptr<Mailbox> mailbox_;  // the engine thread may add to it after our end
  std::vector<int64_t> requests_;
  size_t ended_ = 0;
};

}  // namespace twell
