// SPDX-License-Identifier: Apache-2.0
// Runs any number of requests on one session with continuous batching: prompts go through the
// layers in pieces, together with the tokens of other requests. Of one client it is first come,
// first served. Clients take turns: a free slot goes to the one that has the fewest, a client that
// has none gets one of who has several, whose sequence waits and is computed again, and clients
// share the prompt tokens of a step equally.
//
// Where the session computes ahead, a step begins with the tokens that the device is still drawing,
// and the events of the last step are reported while it runs. A sequence that ends with a token
// that only the host recognises (a stop string, end of text) or is cancelled is then one token
// further on the device, which is dropped. Penalties count tokens on the host, so a step with a
// sequence that has some begins only when its last token is known. A sequence with a filter begins
// its steps early too: the session asks for the mask once it knows the token before.
//
// In: token ids of prompts. Out: events on the engine thread, one per new token. One thread, the
// engine thread, calls step() or run(); submit(), cancel(), cancel_all(), drain() and stats() may
// be called from any thread, also from within an event. The session and the tokenizer must not be
// used by others meanwhile, except for the tokenizer's const functions.
//
// With SchedulerOptions::speculate, a step checks tokens that were guessed from a sequence's own
// text: it draws after each of them, with that position's random number and penalties, and goes on
// as long as the drawn token is the guessed one. The text is the one without, unless the rounding
// of another kernel decides between nearly equal logits.
//
// Each request draws from its own seed, so it gives the same tokens as alone, unless a different
// order of additions in a batch decides between nearly equal logits. A request that loses its place
// in a short cache (preemption) is computed again and gives the same tokens.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "twell/grammar/token_filter.h"
#include "twell/infer/fair_queue.h"
#include "twell/infer/log_probs.h"
#include "twell/infer/sampler.h"
#include "twell/infer/session.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {

enum class StopReason {
  kEndOfText,
  kStopString,
  kMaxTokens,
  kContextFull,
  kCancelled,
  kFailed,     // the session has thrown
  kNotFinite,  // kNoTokenReason, of this request alone
  kNoneFits,   // its filter allows no token
};
inline constexpr size_t kStopReasons = 8;
std::string_view stop_reason_name(StopReason reason);

// The tokens of one request.
struct Usage {
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;     // prompt tokens whose keys and values were already in the cache
  int64_t tokens = 0;            // new tokens, without the end-of-text or stop token
  double prefill_seconds = 0.0;  // of the passes that took pieces of the prompt
  double decode_seconds = 0.0;   // from the first token to the end
  int64_t drafted = 0, accepted = 0;  // tokens that were guessed, and those that were right
};

struct GenerationEvent {
  int64_t request = 0;
  int32_t token = -1;     // the new token; -1: none
  std::string_view text;  // that is final now: no incomplete character, no part of a stop string
  // If asked for, of `token`, or of the token that ended the text.
  const TokenLogProbs* log_probs = nullptr;
  // In the first event after the prompt, if asked for: entry i belongs to prompt token i + 1.
  std::span<const TokenLogProbs> prompt_log_probs;
  std::optional<StopReason> stop;  // set in the request's last event and only there
  Usage usage;                     // so far
};

struct GenerationRequest {
  std::vector<int32_t> prompt;  // at least one token
  SamplerOptions sampler;
  std::vector<TokenBias> logit_bias;  // at most kMostBiases, each token once
  // Most new tokens; the context is also a limit. 0 only with prompt_log_probs: the prompt, which
  // may have one token more than the context, is scored and no token is drawn.
  int64_t max_tokens = 256;
  bool stop_at_end_of_text = true;        // at the tokenizer's end-of-text token
  std::vector<int32_t> stop_tokens;       // in addition
  std::vector<std::string> stop_strings;  // the text ends in front of the first of them
  // What the text is drawn by, for end tokens that end the request: those of stop_tokens and, if it
  // stops there, the tokenizer's. Null: any text.
  std::shared_ptr<TokenFilter> filter;
  std::optional<int64_t> log_probs;  // of new tokens, and of so many most likely ones (0..20)
  std::optional<int64_t> prompt_log_probs;  // of the prompt's tokens from the second on, likewise
  // Whether to take keys and values of an equal beginning from the cache, where the session shares
  // them. They come from another batch, whose rounding may decide between nearly equal logits.
  bool share_beginning = true;
  uint64_t client = 0;  // who asks: clients share the session equally
  // Called on the engine thread, which waits for it: it must neither block nor throw. The event is
  // valid during the call.
  std::function<void(const GenerationEvent& event)> on_event;
  const std::atomic<bool>* cancel = nullptr;  // optional; once true, cancels like cancel()
};
inline constexpr int64_t kMostLogProbs = 20;

// Counts of values by upper bound, as Prometheus shows them.
struct Histogram {
  explicit Histogram(std::vector<double> upper_bounds = {})
      : bounds(std::move(upper_bounds)), counts(bounds.size() + 1) {}
  void add(double value);
  int64_t count() const;

  std::vector<double> bounds;   // ascending
  std::vector<int64_t> counts;  // [bounds + 1] not cumulative; the last: beyond all bounds
  double sum = 0.0;
};

struct SchedulerStats {
  int64_t waiting = 0;  // without a slot
  int64_t running = 0;  // with a slot, their prompt complete or not
  int64_t submitted = 0;
  int64_t refused = 0;  // by submit(), for want of room or draining
  std::vector<int64_t> ended = std::vector<int64_t>(kStopReasons);  // by StopReason
  int64_t steps = 0;
  int64_t prompt_tokens = 0;  // that went through the layers, again after a preemption
  int64_t cached_tokens = 0;  // prompt tokens taken from the cache instead
  int64_t tokens = 0;         // new tokens
  int64_t preemptions = 0;
  int64_t drafted = 0, accepted = 0;  // tokens that were guessed, and those that were right
  CacheUse cache;
  std::vector<ActiveNeurons> layers;  // [L] as of the session's last update
  Histogram first_token_seconds;      // from submit() to the first token
  Histogram between_tokens_seconds;
  Histogram request_seconds;  // from submit() to the end
};

struct SchedulerOptions {
  // Requests without a slot; 0: any number. A client of whom none waits may exceed it by a
  // sixteenth, so that nobody keeps others out.
  int64_t max_waiting = 0;
  // Tokens of a step with prompts: one of each sequence that grows, and pieces of prompts, which
  // get at least half. Bounds the time between two tokens of a sequence; 0: what suits the device.
  int64_t prefill_tokens = 0;
  // Most tokens of a sequence that are guessed from its own text (prompt_draft.h) and checked in a
  // step; fewer where guesses are wrong. The session must have room for so many. 0: none.
  int64_t speculate = 0;
};

class Scheduler {
 public:
  // The session and the tokenizer must outlive this object. InputError on impossible options.
  Scheduler(Session& session, const Tokenizer& tokenizer, const SchedulerOptions& options = {});
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Returns the request's number (0, 1, 2, ...), or nothing when the queue is full or the scheduler
  // drains. InputError when the request is impossible, or when its prompt leaves no room for a
  // token.
  std::optional<int64_t> submit(GenerationRequest request);
  // Queues all of the requests or, when the queue has no room for all or the scheduler drains,
  // none. Returns the number of the first; the others' follow it.
  std::optional<int64_t> submit(std::vector<GenerationRequest> requests);
  // Ends the request in the next step, at the latest after the token being computed; its last event
  // says kCancelled. No effect on a request that has ended.
  void cancel(int64_t request);
  void cancel_all();
  // From now on submit() refuses; run() returns once every request has ended.
  void drain();
  // As of the end of the last step; waiting, submitted and refused requests as of now.
  SchedulerStats stats() const;

  // Assigns free slots to waiting requests, adds a token to every sequence whose prompt is
  // complete, and feeds a piece of the other prompts. Returns false when no request is left. When
  // the session throws, every request ends with kFailed, and the exception is passed on.
  bool step();
  // Steps, and waits for requests when there is none, until drained. Throws what step() throws.
  void run();

 private:
  using Clock = std::chrono::steady_clock;
  struct Request;
  using Requests = std::vector<Request*>;
  // A call of the session that draws tokens and has not been reported.
  struct Pass {
    struct Row {
      Request* request;     // null: has ended or lost its place
      bool prompt = false;  // takes a piece of it
      bool draws = true;    // false: the token after an incomplete prompt, which is ignored
      int64_t row = 0;      // of its first draw in the call
      std::vector<int32_t> drafts = {};
      double cost = 0.0;  // of the drafts
    };
    int64_t call = 0;
    int64_t draws = 0;
    std::vector<Row> rows;
    Clock::time_point start;
  };

  // InputError as for submit().
  void check(const GenerationRequest& asked) const;
  bool advance();
  void end_cancelled();
  void admit_waiting();
  bool reserve_or_preempt(const Request& request, int64_t tokens);
  bool preempt_for(const Request& request, PlacesHeld& held);
  void preempt(Request& request);
  void preempt_youngest();
  PlacesHeld places_held() const;
  // Begins a pass of the session with a token of every sequence that grows, and pieces of prompts
  // behind them; false when there is nothing to begin.
  bool begin_pass();
  // Tokens that so many guesses delay, in a pass whose other rows are so many.
  double draft_cost(int64_t rows, int64_t count) const;
  // What the next pass, whose other rows are so many, guesses for the request: at most `room`
  // tokens, and no more than pay.
  std::vector<int32_t> guess(Request& request, int64_t rows, int64_t room);
  // The same of each sequence that grows, in their order, as many as the session takes in a step.
  std::vector<std::vector<int32_t>> guesses(int64_t rows);
  // Whether guesses may follow a token that is being drawn, so that it is worth waiting for.
  bool waits_for_guesses();
  // Adds the entry's draws to those of the pass.
  void add_draws(Pass::Row row, Pass& pass, std::vector<Draw>& draws,
                 std::deque<std::vector<SeenToken>>& seen) const;
  // Takes the tokens drawn for the row's request, as long as its guesses were right.
  void take_row(const Pass::Row& row, std::span<const int32_t> next);
  void add_prompts(Pass& pass, std::vector<NewTokens>& tokens, std::vector<Draw>& draws,
                   std::deque<std::vector<SeenToken>>& seen);
  std::unordered_map<uint64_t, int64_t> prompt_shares(int64_t room) const;
  // The piece as the session takes it, with the scores that the request wants.
  NewTokens tokens_of(Request& request, std::span<const int32_t> piece) const;
  // Whether the limits allow the request a further token after those being drawn.
  bool grows(const Request& request) const;
  // Whether the next tokens can only be drawn when those being drawn are known.
  bool needs_tokens() const;
  // Adds a pass that has begun, and reports those that it does not run ahead of.
  void begun(Pass pass);
  // Waits for the tokens of the pass that began first, and reports them.
  void report();
  std::optional<StopReason> take(Request& request, int32_t id);
  StopReason end_without_token(const Request& request) const;
  // Keeps the log-probabilities of the token drawn as row `row`, if the request wants them.
  void note_log_probs(Request& request, int32_t id, int64_t row);
  void emit(Request& request, std::optional<StopReason> stop);
  void end(Request& request, StopReason reason);
  void end_all(StopReason reason);
  // What passes under way draw for the request is not wanted.
  void forget(Request& request);
  Draw draw_of(const Request& request) const;
  void publish();

  Session& session_;
  const Tokenizer& tokenizer_;
  SchedulerOptions options_;

  // For the engine thread. Requests are in the order in which they got their slots, and those in
  // running_ got theirs before those in starting_.
  Requests starting_;  // have a slot; prompts incomplete
  Requests running_;
  std::deque<Pass> passes_;  // in the order in which they began
  Clock::time_point last_report_;
  std::vector<int64_t> free_slots_;
  SchedulerStats counts_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  FairQueue<Request> waiting_;
  // Owns every request that has not ended, so that none is lost when the session throws.
  std::unordered_map<int64_t, std::unique_ptr<Request>> live_;
  int64_t submitted_ = 0, refused_ = 0;
  bool draining_ = false;
  SchedulerStats stats_;
};

}  // namespace twell
