// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/answers.h"

#include <utility>

namespace twell {

Answers::~Answers() {
  if (done()) return;
  for (const int64_t request : requests_) scheduler_.cancel(request);
}

bool Answers::submit(GenerationRequest request) {
  request.on_event = [mailbox = mailbox_,
                      sequence = requests_.size()](const GenerationEvent& event) {
    AnswerEvent copy{
        .sequence = sequence,
        .token = event.token,
        .text = std::string(event.text),
        .prompt_log_probs = {event.prompt_log_probs.begin(), event.prompt_log_probs.end()},
        .stop = event.stop,
        .usage = event.usage};
    if (event.log_probs != nullptr) copy.log_probs = *event.log_probs;
    {
      const std::lock_guard lock(mailbox->mutex);
      mailbox->events.push_back(std::move(copy));
    }
    mailbox->arrived.notify_one();
  };
  const std::optional<int64_t> number = scheduler_.submit(std::move(request));
  if (number) requests_.push_back(*number);
  return number.has_value();
}

std::vector<AnswerEvent> Answers::take(std::chrono::milliseconds at_most) {
  std::unique_lock lock(mailbox_->mutex);
  mailbox_->arrived.wait_for(lock, at_most, [&] { return !mailbox_->events.empty(); });
  std::vector<AnswerEvent> events = std::exchange(mailbox_->events, {});
  for (const AnswerEvent& event : events) ended_ += event.stop.has_value();
  return events;
}

}  // namespace twell
