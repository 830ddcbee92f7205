// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/generate.h"

#include <algorithm>

#include "twell/base/error.h"
#include "twell/infer/text_stream.h"

namespace twell {
namespace {

bool is_stop_token(const GenerateOptions& options, int32_t id) {
  return std::find(options.stop_tokens.begin(), options.stop_tokens.end(), id) !=
         options.stop_tokens.end();
}

}  // namespace

struct Generator::Request {
  Request(int64_t number_in, GenerateOptions options_in)
      : number(number_in), options(std::move(options_in)), stream(options.stop_strings) {}

  bool is_cancelled() const {
    return cancelled || (options.cancel != nullptr && options.cancel->load());
  }
  void emit(const std::string& text) {
    if (text.empty()) return;
    result.text += text;
    if (options.on_text) options.on_text(text);
  }

  int64_t number;
  GenerateOptions options;
  TextStream stream;
  Generation result;
  std::vector<int32_t> prompt;
  size_t fed = 0;      // prompt tokens already in the session
  int64_t slot = -1;   // -1 while waiting
  int32_t last = 0;    // last token drawn, not in the session yet
  uint64_t drawn = 0;  // tokens drawn so far
  bool cancelled = false;
  Clock::time_point decode_start;
};

std::string_view stop_reason_name(StopReason reason) {
  switch (reason) {
    case StopReason::kEndOfText:
      return "end of text";
    case StopReason::kStopString:
      return "stop string";
    case StopReason::kMaxTokens:
      return "token limit";
    case StopReason::kContextFull:
      return "context full";
    case StopReason::kCancelled:
      return "cancelled";
  }
  TWELL_CHECK(false, "unknown stop reason {}", static_cast<int>(reason));
}

std::vector<int32_t> prompt_ids(const ModelConfig& config, const Tokenizer& tokenizer,
                                std::string_view prompt, bool begin_token) {
  std::vector<int32_t> ids;
  tokenizer.encode_sequence(prompt, ids, begin_token);
  if (ids.empty()) {
    TWELL_REQUIRE(tokenizer.eos_token() >= 0,
                  "the prompt is empty and the tokenizer has no end-of-text token to start from");
    ids.push_back(tokenizer.eos_token());
  }
  for (const int32_t id : ids) {
    TWELL_REQUIRE(id < config.vocab_size,
                  "the tokenizer gives token {}, but the model has {} tokens", id,
                  config.vocab_size);
  }
  return ids;
}

Generator::Generator(Session& session, const Tokenizer& tokenizer, OnDone on_done)
    : session_(session), tokenizer_(tokenizer), on_done_(std::move(on_done)) {
  for (int64_t slot = session.slots(); slot > 0; --slot) free_slots_.push_back(slot - 1);
}

Generator::~Generator() = default;

int64_t Generator::submit(std::string_view prompt, GenerateOptions options) {
  TWELL_REQUIRE(options.max_tokens > 0, "the number of tokens to generate must be positive, got {}",
                options.max_tokens);
  options.sampler.validate();
  auto request = std::make_unique<Request>(submitted_, std::move(options));
  request->prompt = prompt_ids(session_.config(), tokenizer_, prompt, request->options.begin_token);
  request->result.prompt_tokens = std::ssize(request->prompt);
  TWELL_REQUIRE(std::ssize(request->prompt) < session_.capacity(),
                "the prompt has {} tokens; the context of {} leaves no room for a new one",
                request->prompt.size(), session_.capacity());
  waiting_.push_back(std::move(request));
  return submitted_++;
}

void Generator::cancel(int64_t request) {
  for (const auto& waiting : waiting_) waiting->cancelled |= waiting->number == request;
  for (const auto& starting : starting_) starting->cancelled |= starting->number == request;
  for (const auto& running : running_) running->cancelled |= running->number == request;
}

bool Generator::step() {
  end_cancelled();
  const bool growing = !running_.empty();
  // Feeds one piece of the prompts; if no sequence is decoding, repeats this for all prompts that
  // get a slot. A text of a single token frees its slot at once.
  do {
    admit_waiting();
    if (starting_.empty()) break;
    feed_prompts();
    end_cancelled();
  } while (!growing);
  if (!running_.empty()) grow_running();
  return !waiting_.empty() || !starting_.empty() || !running_.empty();
}

void Generator::end_cancelled() {
  std::vector<std::unique_ptr<Request>> ended;
  const auto take_out = [&](auto& requests) {
    std::erase_if(requests, [&](std::unique_ptr<Request>& request) {
      if (!request->is_cancelled()) return false;
      request->result.reason = StopReason::kCancelled;
      ended.push_back(std::move(request));
      return true;
    });
  };
  take_out(running_);
  take_out(starting_);
  take_out(waiting_);
  for (auto& request : ended) end(std::move(request));
}

Draw Generator::draw_of(const Request& request) const {
  // The output head can have padding rows beyond the tokenizer's ids; these are never drawn.
  return {.sampler = request.options.sampler,
          .vocab = std::min(tokenizer_.vocab_size(), session_.config().vocab_size),
          .index = request.drawn};
}

void Generator::admit_waiting() {
  while (!waiting_.empty() && !free_slots_.empty()) {
    starting_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
    starting_.back()->slot = free_slots_.back();
    free_slots_.pop_back();
    session_.clear(starting_.back()->slot);
  }
}

// Feeds the next piece of the prompts, in order of submission.
void Generator::feed_prompts() {
  int64_t room = session_.prefill_tokens();
  std::vector<Prompt> pieces;
  std::vector<Draw> draws;
  for (const auto& request : starting_) {
    if (room == 0) break;
    const auto rest = std::span<const int32_t>(request->prompt).subspan(request->fed);
    const size_t count = std::min(rest.size(), static_cast<size_t>(room));
    pieces.push_back({.slot = request->slot, .ids = rest.first(count)});
    draws.push_back(draw_of(*request));
    request->fed += count;
    room -= static_cast<int64_t>(count);
  }
  std::vector<int32_t> next(pieces.size());
  const Clock::time_point start = Clock::now();
  session_.append_and_draw(pieces, draws, next);
  const Clock::time_point now = Clock::now();
  std::vector<std::unique_ptr<Request>> ended, not_through;
  for (size_t i = 0; i < starting_.size(); ++i) {
    std::unique_ptr<Request>& request = starting_[i];
    if (i < pieces.size()) {
      request->result.prefill_seconds += std::chrono::duration<double>(now - start).count();
    }
    // The draw after an incomplete prompt is ignored.
    if (request->fed < request->prompt.size()) {
      not_through.push_back(std::move(request));
      continue;
    }
    request->decode_start = now;
    (takes(*request, next[i]) ? running_ : ended).push_back(std::move(request));
  }
  starting_ = std::move(not_through);
  for (auto& request : ended) end(std::move(request));
}

void Generator::grow_running() {
  std::vector<int64_t> slots;
  std::vector<int32_t> ids;
  std::vector<Draw> draws;
  for (const auto& request : running_) {
    slots.push_back(request->slot);
    ids.push_back(request->last);
    draws.push_back(draw_of(*request));
  }
  std::vector<int32_t> next(slots.size());
  session_.decode_and_draw(slots, ids, draws, next);
  std::vector<std::unique_ptr<Request>> ended, going_on;
  for (size_t i = 0; i < next.size(); ++i) {
    (takes(*running_[i], next[i]) ? going_on : ended).push_back(std::move(running_[i]));
  }
  running_ = std::move(going_on);
  for (auto& request : ended) end(std::move(request));
}

// Adds the token; returns whether the request continues after it.
bool Generator::takes(Request& request, int32_t id) {
  Generation& result = request.result;
  ++request.drawn;
  request.last = id;
  if (id == tokenizer_.eos_token() || is_stop_token(request.options, id)) {
    result.reason = StopReason::kEndOfText;
    return false;
  }
  result.ids.push_back(id);
  request.emit(request.stream.push(tokenizer_.token_bytes(id)));
  if (request.stream.stopped()) {
    result.reason = StopReason::kStopString;
  } else if (request.is_cancelled()) {
    result.reason = StopReason::kCancelled;
  } else if (std::ssize(result.ids) == request.options.max_tokens) {
    result.reason = StopReason::kMaxTokens;
  } else if (session_.length(request.slot) == session_.capacity()) {
    result.reason = StopReason::kContextFull;
  } else {
    return true;
  }
  return false;
}

void Generator::end(std::unique_ptr<Request> request) {
  request->emit(request->stream.finish());
  if (request->slot >= 0) {
    free_slots_.push_back(request->slot);
  }
  if (request->drawn > 0) {
    request->result.decode_seconds =
        std::chrono::duration<double>(Clock::now() - request->decode_start).count();
  }
  if (on_done_) on_done_(request->number, std::move(request->result));
}

Generation generate(Session& session, const Tokenizer& tokenizer, std::string_view prompt,
                    const GenerateOptions& options) {
  Generation result;
  Generator generator(session, tokenizer,
                      [&](int64_t, Generation generation) { result = std::move(generation); });
  generator.submit(prompt, options);
  while (generator.step()) {
  }
  return result;
}

}  // namespace twell
