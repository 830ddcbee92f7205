// SPDX-License-Identifier: Apache-2.0
// The sequences that one HTTP request waits for: the engine thread adds their events, a thread of
// the server takes them once it has heard of them.
#pragma once

#include <cstdint>
#include <functional>
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

// Whether a sequence has ended without an answer: the model failed, or the server stops.
bool failed(const std::optional<StopReason>& stop);

// Used by one thread at a time.
class Answers {
 public:
  // The budget holds the prompts, and the events: of a stream until they are taken, of a whole
  // answer as long as this object lives. All arguments must outlive the engine thread.
  Answers(Scheduler& scheduler, Waker& waker, MemoryBudget& budget, bool stream)
      : scheduler_(scheduler),
        waker_(waker),
        prompts_(budget),
        mailbox_(std::make_shared<Mailbox>(budget, stream)) {}
  // Cancels the sequences that have not ended.
  ~Answers();
  Answers(const Answers&) = delete;
  Answers& operator=(const Answers&) = delete;

  // Adds a sequence to those that submit() hands over. False when the budget is used up.
  bool add(GenerationRequest request);
  // Hands the added sequences to the scheduler, which takes all of them or none. False when it has
  // no room for them or drains. InputError as for Scheduler::submit().
  bool submit();
  // From now on until this object's end, `ready` is called when there is something to take: of a
  // stream with its first event and the first after each take(), of a whole answer when all is
  // there. Also when a sequence failed or events were lost.
  void notify(std::function<void()> ready);
  // The events that are new, in order.
  std::vector<AnswerEvent> take();
  // Whether events were lost because the budget was used up. Nothing more arrives then.
  bool overflowed() const;
  // Whether every event of every sequence has been taken.
  bool done() const { return ended_ == submitted_; }

 private:
  struct Mailbox final : Sleeper {
    Mailbox(MemoryBudget& budget, bool stream_in) : stream(stream_in), share(budget) {}

    // Adds an event, unless events are lost, and says whether there is something to take that there
    // was not before.
    bool add(const GenerationEvent& event, size_t sequence);
    bool is_ready() const;
    void wake() override;

    const bool stream;
    mutable std::mutex mutex;  // guards what follows
    std::function<void()> ready;
    std::vector<AnswerEvent> events;
    MemoryBudget::Share share;
    int64_t waiting_bytes = 0;  // of `events`
    size_t running = 0;         // sequences whose last event has not been added
    bool has_failed = false;    // one of them
    bool overflowed = false;    // or nobody takes events any more
  };

  Scheduler& scheduler_;
  Waker& waker_;
  MemoryBudget::Share prompts_;
  std::shared_ptr<Mailbox> mailbox_;      // the engine thread may add to it after our end
  std::vector<GenerationRequest> added_;  // not yet handed over
  size_t submitted_ = 0;
  int64_t first_request_ = 0;  // the scheduler's number of the first one
  size_t ended_ = 0;
};

}  // namespace twell
