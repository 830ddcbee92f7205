// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/answers.h"

#include <utility>

namespace twell {
namespace {

// A log-probability as JSON values and as text, with the token's name and its bytes.
constexpr int64_t kLogProbBytes = 512;

int64_t bytes_of(const TokenLogProbs& token) { return kLogProbBytes * (1 + std::ssize(token.top)); }

// The most that an event takes here and in the answer, which is a copy, JSON values and their text.
int64_t bytes_of(const GenerationEvent& event) {
  int64_t bytes = int64_t{sizeof(AnswerEvent)} + 4 * std::ssize(event.text);
  if (event.log_probs != nullptr) bytes += bytes_of(*event.log_probs);
  for (const TokenLogProbs& token : event.prompt_log_probs) bytes += bytes_of(token);
  return bytes;
}

}  // namespace

bool failed(const std::optional<StopReason>& stop) {
  return stop == StopReason::kFailed || stop == StopReason::kNotFinite ||
         stop == StopReason::kNoneFits || stop == StopReason::kCancelled;
}

bool Answers::Mailbox::is_ready() const {
  return overflowed || has_failed || (stream ? !events.empty() : running == 0);
}

bool Answers::Mailbox::add(const GenerationEvent& event, size_t sequence) {
  const int64_t bytes = bytes_of(event);
  {
    const std::lock_guard lock(mutex);
    if (overflowed) return false;
    if (!share.grow(bytes)) return overflowed = true;
  }
  AnswerEvent copy{
      .sequence = sequence,
      .token = event.token,
      .text = std::string(event.text),
      .prompt_log_probs = {event.prompt_log_probs.begin(), event.prompt_log_probs.end()},
      .stop = event.stop,
      .usage = event.usage};
  if (event.log_probs != nullptr) copy.log_probs = *event.log_probs;
  const std::lock_guard lock(mutex);
  if (overflowed) return false;  // nobody takes events any more, and the share is empty
  const bool was_ready = is_ready();
  events.push_back(std::move(copy));
  waiting_bytes += bytes;
  running -= event.stop.has_value();
  has_failed = has_failed || failed(event.stop);
  return !was_ready && is_ready();
}

// The lock is held, so that `ready` is not called after the end of Answers.
void Answers::Mailbox::wake() {
  const std::lock_guard lock(mutex);
  if (ready && is_ready()) ready();
}

Answers::~Answers() {
  {
    // Events may still come until the sequences are cancelled; nobody takes them.
    const std::lock_guard lock(mailbox_->mutex);
    mailbox_->overflowed = true;
    mailbox_->ready = nullptr;
    mailbox_->events.clear();
    mailbox_->share.clear();
  }
  if (done()) return;
  for (size_t i = 0; i < submitted_; ++i) {
    scheduler_.cancel(first_request_ + static_cast<int64_t>(i));
  }
}

bool Answers::add(GenerationRequest request) {
  // The scheduler has the prompt twice: as it was, and with the new tokens.
  if (!prompts_.grow(2 * std::ssize(request.prompt) * int64_t{sizeof(int32_t)})) return false;
  request.on_event = [&waker = waker_, mailbox = mailbox_,
                      sequence = added_.size()](const GenerationEvent& event) {
    if (mailbox->add(event, sequence)) waker.wake(mailbox);
  };
  added_.push_back(std::move(request));
  return true;
}

bool Answers::submit() {
  const size_t count = added_.size();
  {
    const std::lock_guard lock(mailbox_->mutex);
    mailbox_->running = count;
  }
  const std::optional<int64_t> first = scheduler_.submit(std::exchange(added_, {}));
  if (!first) return false;
  first_request_ = *first;
  submitted_ = count;
  return true;
}

void Answers::notify(std::function<void()> ready) {
  const std::lock_guard lock(mailbox_->mutex);
  mailbox_->ready = std::move(ready);
  if (mailbox_->is_ready()) mailbox_->ready();
}

std::vector<AnswerEvent> Answers::take() {
  const std::lock_guard lock(mailbox_->mutex);
  std::vector<AnswerEvent> events = std::exchange(mailbox_->events, {});
  const int64_t bytes = std::exchange(mailbox_->waiting_bytes, 0);
  if (mailbox_->stream) mailbox_->share.shrink(bytes);
  for (const AnswerEvent& event : events) ended_ += event.stop.has_value();
  return events;
}

bool Answers::overflowed() const {
  const std::lock_guard lock(mailbox_->mutex);
  return mailbox_->overflowed;
}

}  // namespace twell
