// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/scheduler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <unordered_set>
#include <utility>

#include "twell/base/error.h"
#include "twell/infer/generated_text.h"
#include "twell/infer/prompt_draft.h"

namespace twell {
namespace {

double seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

// 1, 2.5, 5 of each power of ten from a millisecond to some minutes.
std::vector<double> second_bounds() {
  return {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,   0.25, 0.5,
          1.0,   2.5,    5.0,   10.0, 25.0,  50.0, 100.0, 250.0};
}

void check_log_probs(const std::optional<int64_t>& count) {
  TWELL_REQUIRE(!count || (*count >= 0 && *count <= kMostLogProbs),
                "log-probabilities are given of at most {} tokens, got {}", kMostLogProbs, *count);
}

// The share of a step of one sequence that the device waits, while the host takes a result and
// begins the next step (some 70 us of 900 us for a 2b model on an H200).
constexpr double kWait = 0.08;

}  // namespace

std::string_view stop_reason_name(StopReason reason) {
  static constexpr std::array<std::string_view, kStopReasons> kNames = {
      "end of text", "stop string", "token limit",      "context full",
      "cancelled",   "failed",      "no finite output", "no token fits"};
  return kNames.at(static_cast<size_t>(reason));
}

void Histogram::add(double value) {
  const auto bound = std::lower_bound(bounds.begin(), bounds.end(), value);
  ++counts[static_cast<size_t>(bound - bounds.begin())];
  sum += value;
}

int64_t Histogram::count() const {
  int64_t total = 0;
  for (const int64_t some : counts) total += some;
  return total;
}

struct Scheduler::Request {
  Request(GenerationRequest asked_in, int64_t most_drafts)
      : asked(std::move(asked_in)),
        context(asked.prompt),
        stream(asked.stop_strings),
        draft_length(most_drafts) {
    for (const auto& [id, bias] : asked.logit_bias) {
      seen_at.emplace(id, seen.size());
      seen.push_back({.id = id, .times = SeenToken::kNowhere, .bias = bias});
    }
    for (const int32_t id : context) see(id, 0);
    // Scores need the logits in front of a token only, so the last one is not fed.
    if (only_scores() && context.size() > 1) context.pop_back();
  }

  // Adds a token to those seen, for penalties.
  void see_in(std::vector<SeenToken>& all, int32_t id, int32_t times) const {
    const auto place = seen_at.find(id);
    SeenToken* token = nullptr;
    if (place != seen_at.end()) {
      token = &all[place->second];
    } else {
      const auto later = std::find_if(all.begin() + std::ssize(seen), all.end(),
                                      [&](const SeenToken& one) { return one.id == id; });
      token = later != all.end() ? &*later : &all.emplace_back(SeenToken{.id = id});
    }
    token->times = std::max(token->times, 0) + times;
  }

  // Notes a token for penalties.
  void see(int32_t id, int32_t times) {
    if (!asked.sampler.penalizes()) return;
    const auto [place, is_new] = seen_at.try_emplace(id, seen.size());
    if (is_new) seen.push_back({.id = id});
    int32_t& so_far = seen[place->second].times;
    so_far = std::max(so_far, 0) + times;
  }

  bool is_cancelled() const {
    return cancelled.load() || (asked.cancel != nullptr && asked.cancel->load());
  }
  uint64_t client() const { return asked.client; }
  int64_t prompt_tokens() const { return std::ssize(asked.prompt); }
  int64_t left() const { return std::ssize(context) - fed; }
  // Whether the logits after prompt tokens are still wanted.
  bool wants_prompt_scores() const {
    return asked.prompt_log_probs && std::ssize(prompt_log_probs) < prompt_tokens() - 1;
  }
  bool only_scores() const { return asked.max_tokens == 0; }
  StopReason end_of_scores() const {
    const auto is_nan = [](const TokenLogProbs& one) { return std::isnan(one.token.log_prob); };
    return std::ranges::any_of(prompt_log_probs, is_nan) ? StopReason::kNotFinite
                                                         : StopReason::kMaxTokens;
  }

  int64_t number = 0;
  GenerationRequest asked;
  std::vector<int32_t> context;  // the prompt and every token drawn that is known
  std::vector<SeenToken> seen;   // its different tokens, if there are penalties, and biased ones
  std::unordered_map<int32_t, size_t> seen_at;
  int64_t fed = 0;      // tokens in the session, once the passes under way have ended
  int64_t slot = -1;    // -1 while waiting
  uint64_t drawn = 0;   // known tokens drawn so far
  int64_t unknown = 0;  // tokens that passes under way draw,
  int64_t row = 0;      // the last of them as this row
  GeneratedText stream;
  PromptLookup lookup;
  DraftLength draft_length;
  std::vector<TokenLogProbs> prompt_log_probs;  // so far
  bool prompt_reported = false;                 // an event has delivered them
  int32_t new_token = -1;                       // of the next event; -1: none
  std::string new_text;                         // of the next event
  std::optional<TokenLogProbs> log_probs;       // of the last token
  std::optional<StopReason> stop;               // once known
  std::atomic<bool> cancelled = false;
  Usage usage;
  Clock::time_point submitted = Clock::now();
  bool admitted = false;  // has had a slot
  std::optional<Clock::time_point> last_token;
  Clock::time_point decode_start;
};

Scheduler::Scheduler(Session& session, const Tokenizer& tokenizer, const SchedulerOptions& options)
    : session_(session), tokenizer_(tokenizer), options_(options) {
  TWELL_REQUIRE(options.max_waiting >= 0, "at most {} waiting requests make no sense",
                options.max_waiting);
  TWELL_REQUIRE(options.prefill_tokens >= 0,
                "prompts go through the layers in pieces of a positive number of tokens, got {}",
                options.prefill_tokens);
  TWELL_REQUIRE(options.speculate >= 0 && options.speculate <= kMostDraft,
                "at most {} tokens can be guessed, got {}", kMostDraft, options.speculate);
  TWELL_CHECK(session.draft_tokens() >= options.speculate,
              "{} guessed tokens in a session with room for {}", options.speculate,
              session.draft_tokens());
  if (options_.prefill_tokens == 0) options_.prefill_tokens = session.prefill_tokens();
  for (int64_t slot = session.slots(); slot > 0; --slot) free_slots_.push_back(slot - 1);
  for (Histogram* histogram :
       {&counts_.first_token_seconds, &counts_.between_tokens_seconds, &counts_.request_seconds}) {
    *histogram = Histogram(second_bounds());
  }
  publish();
}

Scheduler::~Scheduler() = default;

void Scheduler::check(const GenerationRequest& asked) const {
  TWELL_REQUIRE(!asked.prompt.empty(), "a prompt needs at least one token");
  for (const int32_t id : asked.prompt) {
    TWELL_REQUIRE(id >= 0 && id < session_.config().vocab_size,
                  "the prompt has token {}, but the model has {} tokens", id,
                  session_.config().vocab_size);
  }
  TWELL_REQUIRE(asked.max_tokens > 0 || (asked.max_tokens == 0 && asked.prompt_log_probs),
                "the number of tokens to generate must be positive, got {}", asked.max_tokens);
  if (asked.max_tokens == 0) {
    TWELL_REQUIRE(std::ssize(asked.prompt) - 1 <= session_.capacity(),
                  "the prompt has {} tokens; with a context of {} at most {} can be scored",
                  asked.prompt.size(), session_.capacity(), session_.capacity() + 1);
  } else {
    TWELL_REQUIRE(std::ssize(asked.prompt) < session_.capacity(),
                  "the prompt has {} tokens; the context of {} leaves no room for a new one",
                  asked.prompt.size(), session_.capacity());
  }
  asked.sampler.validate();
  TWELL_REQUIRE(std::ssize(asked.logit_bias) <= kMostBiases,
                "at most {} tokens can have a bias, got {}", kMostBiases, asked.logit_bias.size());
  std::unordered_set<int32_t> biased;
  for (const auto& [id, bias] : asked.logit_bias) {
    TWELL_REQUIRE(id >= 0 && id < session_.config().vocab_size,
                  "a bias for token {}, but the model has {} tokens", id,
                  session_.config().vocab_size);
    TWELL_REQUIRE(bias >= -kMostBias && bias <= kMostBias,
                  "the bias of token {} must be from {} to {}, got {}", id, -kMostBias, kMostBias,
                  bias);
    TWELL_REQUIRE(biased.insert(id).second, "token {} has two biases", id);
  }
  check_log_probs(asked.log_probs);
  check_log_probs(asked.prompt_log_probs);
}

std::optional<int64_t> Scheduler::submit(GenerationRequest request) {
  std::vector<GenerationRequest> requests;
  requests.push_back(std::move(request));
  return submit(std::move(requests));
}

std::optional<int64_t> Scheduler::submit(std::vector<GenerationRequest> asked) {
  std::vector<std::unique_ptr<Request>> requests;
  for (GenerationRequest& one : asked) {
    check(one);
    requests.push_back(std::make_unique<Request>(std::move(one), options_.speculate));
    requests.back()->usage.prompt_tokens = requests.back()->prompt_tokens();
  }

  const std::lock_guard lock(mutex_);
  const bool is_first = !requests.empty() && waiting_.size_of(requests.front()->client()) == 0;
  const int64_t most = options_.max_waiting + (is_first ? options_.max_waiting / 16 : 0);
  const bool full = options_.max_waiting > 0 && waiting_.size() + std::ssize(requests) > most;
  if (full || draining_) {
    refused_ += std::ssize(requests);
    return std::nullopt;
  }
  const int64_t first = submitted_;
  for (std::unique_ptr<Request>& request : requests) {
    request->number = submitted_++;
    waiting_.push_back(request.get());
    live_.emplace(request->number, std::move(request));
  }
  changed_.notify_all();
  return first;
}

void Scheduler::cancel(int64_t request) {
  const std::lock_guard lock(mutex_);
  if (const auto it = live_.find(request); it != live_.end()) it->second->cancelled = true;
}

void Scheduler::cancel_all() {
  const std::lock_guard lock(mutex_);
  for (const auto& [number, request] : live_) request->cancelled = true;
}

void Scheduler::drain() {
  const std::lock_guard lock(mutex_);
  draining_ = true;
  changed_.notify_all();
}

SchedulerStats Scheduler::stats() const {
  const std::lock_guard lock(mutex_);
  SchedulerStats stats = stats_;
  stats.submitted = submitted_;
  stats.refused = refused_;
  stats.waiting = waiting_.size();
  return stats;
}

void Scheduler::publish() {
  counts_.running = std::ssize(running_) + std::ssize(starting_);
  counts_.cache = session_.cache_use();
  counts_.layers = session_.active_neurons();
  const std::lock_guard lock(mutex_);
  stats_ = counts_;
}

void Scheduler::run() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return draining_ || !live_.empty(); });
      if (live_.empty()) return;
    }
    while (step()) {
    }
  }
}

bool Scheduler::step() {
  try {
    return advance();
  } catch (...) {
    end_all(StopReason::kFailed);
    publish();
    throw;
  }
}

bool Scheduler::advance() {
  ++counts_.steps;
  end_cancelled();
  admit_waiting();
  if (!begin_pass()) {
    while (!passes_.empty()) report();
  }
  publish();
  const std::lock_guard lock(mutex_);
  return !live_.empty() || !passes_.empty();
}

void Scheduler::begun(Pass pass) {
  const auto guesses = [](const Pass::Row& row) { return !row.drafts.empty(); };
  // What follows is known when it is known which guesses were right.
  const bool waits = std::ranges::any_of(pass.rows, guesses);
  passes_.push_back(std::move(pass));
  while (std::ssize(passes_) > (waits ? 0 : session_.draws_ahead())) report();
}

void Scheduler::report() {
  const Pass pass = std::move(passes_.front());
  passes_.pop_front();
  const auto is_wanted = [](const Pass::Row& row) { return row.request != nullptr; };
  if (std::ranges::none_of(pass.rows, is_wanted)) return;
  std::vector<int32_t> next(static_cast<size_t>(pass.draws));
  session_.drawn(pass.call, next);
  const Clock::time_point now = Clock::now();
  // Until the last report, the device was at work on the pass before.
  const double pass_seconds = seconds(now - std::max(pass.start, last_report_));
  last_report_ = now;
  for (size_t i = 0; i < pass.rows.size(); ++i) {
    if (!is_wanted(pass.rows[i])) continue;
    Request& request = *pass.rows[i].request;
    if (pass.rows[i].prompt) request.usage.prefill_seconds += pass_seconds;
    if (!pass.rows[i].draws) continue;
    --request.unknown;
    if (request.drawn == 0) request.decode_start = now;
    if (request.only_scores()) {
      request.stop = request.end_of_scores();
    } else {
      take_row(pass.rows[i], next);
    }
  }
  Requests ended;
  std::erase_if(running_, [&](Request* request) {
    if (request->stop) ended.push_back(request);
    return request->stop.has_value();
  });
  for (Request* request : ended) end(*request, *request->stop);
}

void Scheduler::take_row(const Pass::Row& row, std::span<const int32_t> next) {
  Request& request = *row.request;
  const std::span<const int32_t> drafts = row.drafts;
  size_t right = 0;
  while (true) {
    const int64_t drawn_as = row.row + static_cast<int64_t>(right);
    const int32_t id = next[static_cast<size_t>(drawn_as)];
    note_log_probs(request, id, drawn_as);
    // Counted first: the token's event tells of it.
    const bool is_right = right < drafts.size() && id == drafts[right];
    if (!drafts.empty() && right == 0) request.usage.drafted += std::ssize(drafts);
    request.usage.accepted += is_right;
    request.stop = take(request, id);
    right += is_right;
    if (request.stop || !is_right) break;
  }
  if (options_.speculate == 0) return;
  const auto count = static_cast<int64_t>(right);
  request.draft_length.took(std::ssize(drafts), count, row.cost);
  if (drafts.empty()) return;
  counts_.drafted += std::ssize(drafts);
  counts_.accepted += count;
  session_.keep(request.slot, drafts.first(right));
  request.fed += count;
}

void Scheduler::forget(Request& request) {
  request.unknown = 0;
  if (request.asked.filter) request.asked.filter->rewind(request.drawn);
  for (Pass& pass : passes_) {
    for (Pass::Row& row : pass.rows) {
      if (row.request == &request) row.request = nullptr;
    }
  }
}

void Scheduler::end_cancelled() {
  Requests ended;
  const auto is_over = [&](Request* request) {
    if (!request->is_cancelled()) return false;
    ended.push_back(request);
    return true;
  };
  std::erase_if(running_, is_over);
  std::erase_if(starting_, is_over);
  {
    const std::lock_guard lock(mutex_);
    waiting_.erase_if(is_over);
  }
  for (Request* request : ended) end(*request, StopReason::kCancelled);
}

void Scheduler::end_all(StopReason reason) {
  running_.clear();
  starting_.clear();
  passes_.clear();
  Requests ended;
  {
    const std::lock_guard lock(mutex_);
    waiting_.clear();
    for (const auto& [number, request] : live_) ended.push_back(request.get());
  }
  std::ranges::sort(ended, {}, [](const Request* request) { return request->number; });
  for (Request* request : ended) {
    try {
      end(*request, reason);
    } catch (const std::exception&) {
      // The session cannot even forget the sequence: its slot is lost, but the others still end.
    }
  }
}

Draw Scheduler::draw_of(const Request& request) const {
  // The output head can have padding rows beyond the tokenizer's ids; these are never drawn.
  return {.sampler = request.asked.sampler,
          .vocab = std::min(tokenizer_.vocab_size(), session_.config().vocab_size),
          .index = request.drawn + static_cast<uint64_t>(request.unknown),
          .seen = request.seen,
          .log_probs = request.only_scores() ? std::nullopt : request.asked.log_probs,
          .filter = request.asked.filter.get()};
}

// The request whose turn it is waits until the cache has room for the rest of its prompt and for a
// further block of each sequence that grows, so that it is not preempted at once. Nobody overtakes
// it but a client with fewer slots.
void Scheduler::admit_waiting() {
  const int64_t block = session_.cache_use().block_tokens;
  const auto blocks = [&](int64_t tokens) { return (tokens + block - 1) / block; };
  // Blocks that a request will still take: for the rest of its tokens, and one to grow if its
  // capacity does not end there.
  const auto blocks_ahead = [&](const Request& request) {
    const int64_t held = blocks(request.fed);
    const int64_t fed = blocks(std::ssize(request.context) + request.unknown);
    return std::min(fed + 1, blocks(session_.capacity())) - held;
  };
  PlacesHeld held = places_held();
  const auto put_back = [&](Request* request) {
    const std::lock_guard lock(mutex_);
    waiting_.push_front(request);
  };
  while (true) {
    Request* request = nullptr;
    {
      const std::lock_guard lock(mutex_);
      request = waiting_.pop(held);
    }
    if (request == nullptr) return;
    if (free_slots_.empty() && !preempt_for(*request, held)) return put_back(request);
    const int64_t slot = free_slots_.back();
    // Prompts whose scores are wanted go through the layers as a whole.
    std::span<const int32_t> shared;
    if (request->asked.share_beginning && !request->wants_prompt_scores()) {
      shared = request->context;
    }
    request->fed = session_.start(slot, shared);
    int64_t promised = blocks_ahead(*request);
    for (const auto& other : starting_) promised += blocks_ahead(*other);
    for (const auto& other : running_) promised += blocks_ahead(*other);
    const bool alone = running_.empty() && starting_.empty();
    if (!alone && session_.free_tokens() / block < promised) {
      session_.clear(slot);
      request->fed = 0;
      const bool made_room = preempt_for(*request, held);
      put_back(request);
      if (made_room) continue;
      return;
    }
    ++held[request->client()];
    request->slot = slot;
    free_slots_.pop_back();
    if (!request->admitted) {
      request->admitted = true;
      request->usage.cached_tokens = request->fed;
      counts_.cached_tokens += request->fed;
    }
    starting_.push_back(request);
  }
}

PlacesHeld Scheduler::places_held() const {
  PlacesHeld held;
  for (const Request* request : running_) ++held[request->client()];
  for (const Request* request : starting_) ++held[request->client()];
  return held;
}

// Takes the slot of a request, which waits in front of its client's others and is computed again.
void Scheduler::preempt(Request& request) {
  if (std::erase(starting_, &request) == 0) std::erase(running_, &request);
  forget(request);
  session_.clear(request.slot);
  free_slots_.push_back(std::exchange(request.slot, -1));
  request.fed = 0;
  ++counts_.preemptions;
  const std::lock_guard lock(mutex_);
  waiting_.push_front(&request);
}

void Scheduler::preempt_youngest() { preempt(*(starting_.empty() ? running_ : starting_).back()); }

// Takes a slot, if the request's client has none, from the client with the most, if these are
// several: from the youngest of its sequences.
bool Scheduler::preempt_for(const Request& request, PlacesHeld& held) {
  if (places_of(held, request.client()) > 0) return false;
  int64_t most = 0;
  for (const auto& [client, places] : held) most = std::max(most, places);
  if (most < 2) return false;
  const auto has_most = [&](const Request* one) { return held[one->client()] == most; };
  Request* youngest = nullptr;
  for (const Requests* requests : {&starting_, &running_}) {
    const auto found = std::find_if(requests->rbegin(), requests->rend(), has_most);
    if (youngest == nullptr && found != requests->rend()) youngest = *found;
  }
  --held[youngest->client()];
  preempt(*youngest);
  return true;
}

// Makes room for tokens of the request, at the cost of those that arrived after it. False when it
// has arrived last itself.
bool Scheduler::reserve_or_preempt(const Request& request, int64_t tokens) {
  while (!session_.reserve(request.slot, tokens)) {
    const Requests& youngest = starting_.empty() ? running_ : starting_;
    if (youngest.back() == &request) return false;
    preempt_youngest();
  }
  return true;
}

NewTokens Scheduler::tokens_of(Request& request, std::span<const int32_t> piece) const {
  NewTokens out{.slot = request.slot, .ids = piece};
  if (!request.wants_prompt_scores()) return out;
  const std::span<const int32_t> prompt = request.asked.prompt;
  const auto next_one = static_cast<size_t>(request.fed) + 1;
  // After a preemption they are computed again.
  request.prompt_log_probs.resize(next_one - 1);
  out.targets = prompt.subspan(next_one, std::min(piece.size(), prompt.size() - next_one));
  out.top = *request.asked.prompt_log_probs;
  out.vocab = draw_of(request).vocab;
  out.scores = &request.prompt_log_probs;
  return out;
}

bool Scheduler::grows(const Request& request) const {
  return !request.only_scores() &&
         request.usage.tokens + request.unknown < request.asked.max_tokens &&
         request.prompt_tokens() + request.usage.tokens + request.unknown < session_.capacity();
}

double Scheduler::draft_cost(int64_t rows, int64_t count) const {
  if (count == 0) return 0.0;
  const double alone = session_.step_cost(rows);
  // The time that a step takes longer delays every sequence by a share of a token. The host also
  // waits for the result before it begins the next step.
  const double wait = session_.draws_ahead() > 0 ? kWait : 0.0;
  return static_cast<double>(rows) * (session_.step_cost(rows + count) - alone + wait) / alone;
}

std::vector<int32_t> Scheduler::guess(Request& request, int64_t rows, int64_t room) {
  // With a filter, whether a guess is allowed is known once the one before it is.
  if (options_.speculate == 0 || room == 0 || request.asked.filter) return {};
  const auto cost_of = [&](int64_t count) { return draft_cost(rows, count); };
  // The last row draws the token behind the last guess.
  const int64_t context = std::ssize(request.context) + request.unknown;
  const int64_t most =
      std::min({room, request.draft_length.next(cost_of), session_.capacity() - context - 1,
                request.asked.max_tokens - request.usage.tokens - request.unknown - 1});
  if (most <= 0) return {};
  return request.lookup.guess(request.context, most);
}

std::vector<std::vector<int32_t>> Scheduler::guesses(int64_t rows) {
  std::vector<std::vector<int32_t>> out;
  int64_t count = 0;
  for (Request* request : running_) {
    if (!grows(*request)) continue;
    out.push_back({});
    if (request->unknown > 0) continue;
    out.back() = guess(*request, rows, session_.draft_tokens() - count);
    count += std::ssize(out.back());
  }
  for (const int64_t taken = session_.drafts_of_step(count); count > taken; --count) {
    std::ranges::max_element(out, {}, [](const auto& drafts) { return drafts.size(); })->pop_back();
  }
  return out;
}

bool Scheduler::waits_for_guesses() {
  const int64_t rows = std::ssize(running_);
  for (Request* request : running_) {
    if (request->unknown == 0 || !grows(*request)) continue;
    if (guess(*request, rows, session_.draft_tokens()).empty()) continue;
    // A wrong guess for the unknown token costs the wait alone.
    request->draft_length.took(0, 0, static_cast<double>(rows) * kWait / session_.step_cost(rows));
    return true;
  }
  return false;
}

bool Scheduler::needs_tokens() const {
  const int64_t block = session_.cache_use().block_tokens;
  int64_t new_blocks = 0;
  for (const Request* request : running_) {
    if (!grows(*request)) continue;
    if (request->unknown > 0 && request->asked.sampler.penalizes()) return true;
    new_blocks += request->fed % block == 0;
  }
  // Sequences that turn out to have ended make room, so that none need be preempted.
  return new_blocks * block > session_.free_tokens();
}

// Sequences that grow take their place in the cache first: they have arrived before those whose
// prompts are incomplete.
bool Scheduler::begin_pass() {
  while (!passes_.empty() && needs_tokens()) report();
  if (options_.speculate > 0 && !passes_.empty() && waits_for_guesses()) {
    while (!passes_.empty()) report();
  }
  // In order of arrival, so that the oldest are never preempted.
  for (size_t i = 0; i < running_.size(); ++i) {
    if (grows(*running_[i]) && !reserve_or_preempt(*running_[i], 1)) preempt_youngest();
  }
  Pass pass{.start = Clock::now()};
  std::vector<NewTokens> tokens;
  std::vector<Draw> draws;
  std::deque<std::vector<SeenToken>> seen;  // behind guesses
  std::vector<int32_t> last;                // tokens of sequences that grow
  last.reserve(running_.size());
  const auto growing = std::ranges::count_if(running_, [&](auto* one) { return grows(*one); });
  std::vector<std::vector<int32_t>> drafts = guesses(growing);
  for (Request* request : running_) {
    if (!grows(*request)) continue;
    Pass::Row row{.request = request, .drafts = std::move(drafts[pass.rows.size()])};
    // Nobody loses a place for a guess.
    if (!session_.reserve(request->slot, 1 + std::ssize(row.drafts))) row.drafts.clear();
    row.cost = draft_cost(growing, std::ssize(row.drafts));
    last.push_back(request->unknown > 0 ? Session::the_drawn(request->row)
                                        : request->context.back());
    tokens.push_back({.slot = request->slot, .ids = {&last.back(), 1}});
    add_draws(std::move(row), pass, draws, seen);
  }
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i].drafts = pass.rows[i].drafts;
  add_prompts(pass, tokens, draws, seen);
  if (tokens.empty()) return false;
  pass.draws = std::ssize(draws);
  pass.call = session_.append_and_draw(tokens, draws);
  for (size_t i = 0; i < pass.rows.size(); ++i) {
    Request& request = *pass.rows[i].request;
    request.fed += std::ssize(tokens[i].ids);
    if (!pass.rows[i].draws) continue;
    ++request.unknown;
    request.row = pass.rows[i].row;
  }
  const auto is_through = [](const Request* request) { return request->left() == 0; };
  std::ranges::copy_if(starting_, std::back_inserter(running_), is_through);
  std::erase_if(starting_, is_through);
  begun(std::move(pass));
  return true;
}

void Scheduler::add_draws(Pass::Row row, Pass& pass, std::vector<Draw>& draws,
                          std::deque<std::vector<SeenToken>>& seen) const {
  const Request& request = *row.request;
  row.row = std::ssize(draws);
  Draw draw = draw_of(request);
  draws.push_back(draw);
  for (const int32_t draft : row.drafts) {
    ++draw.index;
    if (request.asked.sampler.penalizes()) {
      seen.emplace_back(draw.seen.begin(), draw.seen.end());
      request.see_in(seen.back(), draft, 1);
      draw.seen = seen.back();
    }
    draws.push_back(draw);
  }
  pass.rows.push_back(std::move(row));
}

// What each client with incomplete prompts may add to a step with room for so many of their tokens:
// an equal share, or all of its prompts where that is less.
std::unordered_map<uint64_t, int64_t> Scheduler::prompt_shares(int64_t room) const {
  std::unordered_map<uint64_t, int64_t> shares;
  for (const Request* request : starting_) shares[request->client()] += request->left();
  std::vector<int64_t*> by_size;
  for (auto& [client, tokens] : shares) by_size.push_back(&tokens);
  std::ranges::sort(by_size, {}, [](const int64_t* tokens) { return *tokens; });
  int64_t clients = std::ssize(by_size);
  for (int64_t* tokens : by_size) {
    *tokens = std::min(*tokens, (room + clients - 1) / clients);
    room -= *tokens;
    --clients;
  }
  return shares;
}

// Adds the next pieces of the prompts, of each client in order of arrival: the rest of some, part
// of one more. They have the room that sequences that grow leave, and at least half of the step.
void Scheduler::add_prompts(Pass& pass, std::vector<NewTokens>& tokens, std::vector<Draw>& draws,
                            std::deque<std::vector<SeenToken>>& seen) {
  const int64_t all = options_.prefill_tokens;
  auto shares = prompt_shares(std::max(all - std::ssize(tokens), (all + 1) / 2));
  for (size_t i = 0; i < starting_.size(); ++i) {
    Request& request = *starting_[i];
    int64_t& share = shares[request.client()];
    const int64_t count = std::min(request.left(), share);
    if (count == 0) continue;
    if (!reserve_or_preempt(request, count)) break;
    share -= count;
    tokens.push_back(tokens_of(
        request, std::span(request.context)
                     .subspan(static_cast<size_t>(request.fed), static_cast<size_t>(count))));
    add_draws({.request = &request, .prompt = true, .draws = count == request.left()}, pass, draws,
              seen);
    if (count < request.left() || request.only_scores()) draws.back().filter = nullptr;
    counts_.prompt_tokens += count;
  }
  TWELL_CHECK(starting_.empty() || !tokens.empty() || !running_.empty(),
              "the cache has no room for the only sequence, of {} tokens",
              starting_.front()->context.size());
}

void Scheduler::note_log_probs(Request& request, int32_t id, int64_t row) {
  if (id == kNoToken || request.only_scores() || !request.asked.log_probs) return;
  request.log_probs = session_.drawn_log_probs(row);
}

// Why no token was drawn.
StopReason Scheduler::end_without_token(const Request& request) const {
  if (!request.asked.filter) return StopReason::kNotFinite;
  std::vector<uint32_t> mask(static_cast<size_t>(token_mask_words(draw_of(request).vocab)));
  request.asked.filter->allowed(mask);
  const bool none = std::ranges::all_of(mask, [](uint32_t word) { return word == 0; });
  return none ? StopReason::kNoneFits : StopReason::kNotFinite;
}

// Adds the token. Returns why the request ends with it; its last event is then left to end().
std::optional<StopReason> Scheduler::take(Request& request, int32_t id) {
  const GenerationRequest& asked = request.asked;
  if (id == kNoToken) return end_without_token(request);
  if (asked.filter) asked.filter->accept(request.drawn, id);
  ++request.drawn;
  request.context.push_back(id);
  request.see(id, 1);
  const auto& stop_tokens = asked.stop_tokens;
  if ((asked.stop_at_end_of_text && id == tokenizer_.eos_token()) ||
      std::find(stop_tokens.begin(), stop_tokens.end(), id) != stop_tokens.end()) {
    return StopReason::kEndOfText;
  }
  const Clock::time_point now = Clock::now();
  if (request.last_token) {
    counts_.between_tokens_seconds.add(seconds(now - *request.last_token));
  } else {
    counts_.first_token_seconds.add(seconds(now - request.submitted));
  }
  request.last_token = now;
  ++request.usage.tokens;
  ++counts_.tokens;
  request.new_token = id;
  request.new_text = request.stream.push(tokenizer_.token_bytes(id));
  if (request.stream.stopped()) return StopReason::kStopString;
  if (request.is_cancelled()) return StopReason::kCancelled;
  if (asked.filter && asked.filter->ended()) return StopReason::kEndOfText;
  if (request.usage.tokens == asked.max_tokens) return StopReason::kMaxTokens;
  if (std::ssize(request.context) >= session_.capacity()) return StopReason::kContextFull;
  emit(request, {});
  return {};
}

// Reports the new token, if there is one, and the end, if there is a reason.
void Scheduler::emit(Request& request, std::optional<StopReason> stop) {
  const int32_t token = std::exchange(request.new_token, -1);
  const std::string text = std::exchange(request.new_text, {});
  if (request.last_token)
    request.usage.decode_seconds = seconds(Clock::now() - request.decode_start);
  if (!request.asked.on_event) return;
  GenerationEvent event{.request = request.number,
                        .token = token,
                        .text = text,
                        .stop = stop,
                        .usage = request.usage};
  const bool drew = token >= 0 || stop == StopReason::kEndOfText;
  if (drew && request.log_probs) event.log_probs = &*request.log_probs;
  if (!std::exchange(request.prompt_reported, true)) {
    event.prompt_log_probs = request.prompt_log_probs;
  }
  request.asked.on_event(event);
}

void Scheduler::end(Request& request, StopReason reason) {
  request.new_text += request.stream.finish();
  ++counts_.ended[static_cast<size_t>(reason)];
  counts_.request_seconds.add(seconds(Clock::now() - request.submitted));
  std::unique_ptr<Request> owned;
  {
    const std::lock_guard lock(mutex_);
    const auto live = live_.find(request.number);
    owned = std::move(live->second);
    live_.erase(live);
  }
  forget(request);
  emit(request, reason);
  if (request.slot < 0) return;
  if (reason == StopReason::kNotFinite) {
    session_.discard(request.slot);
  } else {
    session_.clear(request.slot);
  }
  free_slots_.push_back(request.slot);
}

}  // namespace twell
