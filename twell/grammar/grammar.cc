// SPDX-License-Identifier: Apache-2.0
#include "twell/grammar/grammar.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "twell/grammar/gbnf.h"
#include "twell/grammar/json_schema.h"

#ifdef TWELL_HAVE_XGRAMMAR

#include <xgrammar/compiler.h>
#include <xgrammar/matcher.h>

namespace {

// While a grammar is made on this thread, the library's first warning is kept here.
thread_local std::string* grammar_warning = nullptr;

}  // namespace

// XGrammar calls these in place of printing.
namespace xgrammar {

[[noreturn]] void LogFatalImpl(const std::string&, int, const std::string& message);
void LogMessageImpl(const std::string&, int, int level, const std::string& message);

void LogFatalImpl(const std::string&, int, const std::string& message) {
  throw std::runtime_error(message);
}
void LogMessageImpl(const std::string&, int, int level, const std::string& message) {
  constexpr int kWarning = 2;
  if (level == kWarning && grammar_warning != nullptr && grammar_warning->empty()) {
    *grammar_warning = message;
  }
}

}  // namespace xgrammar

namespace twell {
namespace {

// Blanks in a row between the parts of a JSON text: enough for the indentation of deep objects, and
// a model that has begun to write blanks comes to an end.
constexpr int kMostBlanks = 32;
constexpr std::chrono::seconds kGoodbye{5};  // for grammars that are still being compiled

// The library's message without the condition and the place in its sources.
std::string plain(std::string message) {
  if (const size_t at = message.find("is false: "); at != std::string::npos) {
    message.erase(0, at + std::string_view("is false: ").size());
  }
  while (!message.empty() && (message.back() == '\n' || message.back() == ' ')) message.pop_back();
  constexpr size_t kMost = 300;
  if (message.size() > kMost) message = message.substr(0, kMost) + "...";
  return message.empty() ? "the library gives no reason" : message;
}

}  // namespace

struct Grammar::Impl {
  xgrammar::CompiledGrammar compiled;
  int64_t vocab = 0;
};

namespace {

class GrammarFilter final : public TokenFilter {
 public:
  GrammarFilter(std::shared_ptr<const Grammar::Impl> grammar, std::span<const int32_t> end_tokens)
      : grammar_(std::move(grammar)),
        matcher_(grammar_->compiled,
                 end_tokens.empty()
                     ? std::nullopt
                     : std::optional(std::vector<int>(end_tokens.begin(), end_tokens.end())),
                 /*terminate_without_stop_token=*/end_tokens.empty()) {}

  void accept(uint64_t index, int32_t id) override {
    if (index < accepted_) return;
    TWELL_CHECK(index == accepted_, "token {} of a text after {}", index, accepted_);
    ++accepted_;
    // A token that does not fit was drawn behind the end, and is dropped.
    if (!lost_ && (matcher_.IsTerminated() || !matcher_.AcceptToken(id))) lost_ = accepted_;
  }
  void rewind(uint64_t index) override {
    if (index >= accepted_) return;
    const uint64_t kept = lost_ ? *lost_ - 1 : accepted_;  // tokens that the matcher holds
    if (kept > index) matcher_.Rollback(static_cast<int>(kept - index));
    if (lost_ && *lost_ > index) lost_.reset();
    accepted_ = index;
  }
  void allowed(std::span<uint32_t> mask) override {
    TWELL_CHECK(std::ssize(mask) == token_mask_words(grammar_->vocab),
                "a mask of {} words for {} tokens", mask.size(), grammar_->vocab);
    if (lost_ || matcher_.IsTerminated()) {
      std::ranges::fill(mask, ~0u);
    } else {
      int64_t shape = std::ssize(mask);
      DLTensor tensor{.data = mask.data(),
                      .device = {kDLCPU, 0},
                      .ndim = 1,
                      .dtype = xgrammar::GetBitmaskDLType(),
                      .shape = &shape,
                      .strides = nullptr,
                      .byte_offset = 0};
      matcher_.FillNextTokenBitmask(&tensor);
    }
    if (const int64_t beyond = grammar_->vocab % 32; beyond != 0) {
      mask.back() &= (1u << beyond) - 1;
    }
  }
  bool ended() const override { return matcher_.IsTerminated(); }

 private:
  std::shared_ptr<const Grammar::Impl> grammar_;
  xgrammar::GrammarMatcher matcher_;
  uint64_t accepted_ = 0;
  std::optional<uint64_t> lost_;  // the number of tokens with which the text was left
};

}  // namespace

std::unique_ptr<TokenFilter> Grammar::filter(std::span<const int32_t> end_tokens) const {
  return std::make_unique<GrammarFilter>(impl_, end_tokens);
}
int64_t Grammar::bytes() const { return static_cast<int64_t>(impl_->compiled.MemorySizeBytes()); }

namespace {

using Clock = std::chrono::steady_clock;

// Somebody who waits for a grammar. An order may end while it is told, hence a recursive mutex.
struct GrammarWaiter {
  std::recursive_mutex mutex;
  bool waits = false;
  std::function<void()> ready;

  void tell() {
    const std::lock_guard lock(mutex);
    if (waits) ready();
  }
};

struct GrammarJob {
  GrammarText text;
  Clock::time_point deadline;
  bool done = false, given_up = false, busy = false;
  std::optional<Grammar> grammar;  // or
  std::string refusal;             // why there is none
  std::vector<std::shared_ptr<GrammarWaiter>> waiters;
};

// Shared with the threads and the orders, which may outlive the compiler.
struct GrammarState {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<GrammarJob>> waiting;
  std::shared_ptr<GrammarJob> running;
  std::map<GrammarText, std::shared_ptr<GrammarJob>> jobs;  // waiting, running, or cached
  std::list<GrammarText> recent;                            // that are cached, the last used first
  int64_t cached_bytes = 0;
  int64_t given_up = 0;  // jobs that still run
  bool ends = false;

  // The lock is held.
  void finish(GrammarJob& job) {
    job.done = true;
    for (const auto& waiter : job.waiters) waiter->tell();
    job.waiters.clear();
    changed.notify_all();
  }
};

}  // namespace

struct GrammarOrder::Impl {
  std::shared_ptr<GrammarState> state;
  std::shared_ptr<GrammarJob> job;
  std::shared_ptr<GrammarWaiter> waiter = std::make_shared<GrammarWaiter>();

  Impl(std::shared_ptr<GrammarState> state_in, std::shared_ptr<GrammarJob> job_in)
      : state(std::move(state_in)), job(std::move(job_in)) {}
  ~Impl() {
    const std::lock_guard lock(waiter->mutex);
    waiter->waits = false;
  }
};

GrammarOrder::GrammarOrder(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GrammarOrder::~GrammarOrder() = default;
GrammarOrder::GrammarOrder(GrammarOrder&&) noexcept = default;

bool GrammarOrder::is_ready() const {
  const std::lock_guard lock(impl_->state->mutex);
  return impl_->job->done;
}

void GrammarOrder::notify(std::function<void()> ready) {
  const std::lock_guard lock(impl_->state->mutex);
  if (impl_->job->done) return ready();
  impl_->waiter->ready = std::move(ready);
  impl_->waiter->waits = true;
  impl_->job->waiters.push_back(impl_->waiter);
}

Grammar GrammarOrder::get() {
  std::unique_lock lock(impl_->state->mutex);
  const GrammarJob& job = *impl_->job;
  impl_->state->changed.wait(lock, [&] { return job.done; });
  if (job.busy) throw GrammarBusy("other grammars are being compiled; try again later");
  TWELL_REQUIRE(job.grammar, "the grammar is refused: {}", job.refusal);
  return *job.grammar;
}

// One thread compiles. It is left alone with a grammar that takes too long, and another takes over.
struct GrammarCompiler::Impl {
  using Job = GrammarJob;
  using State = GrammarState;
  static constexpr int64_t kMostGivenUp = 2;
  static constexpr size_t kMostWaiting = 16;

  Impl(const Tokenizer& tokenizer_in, GrammarOptions options_in)
      : tokenizer(tokenizer_in), options(std::move(options_in)) {}

  const Tokenizer tokenizer;
  const GrammarOptions options;
  std::shared_ptr<State> state = std::make_shared<State>();
  std::shared_ptr<xgrammar::GrammarCompiler> library;  // made with the first grammar
  std::thread worker;                                  // compiles
  std::thread watchman;                                // gives up what takes too long

  std::vector<std::string> vocabulary() const {
    std::vector<std::string> tokens;
    for (int64_t i = 0; i < tokenizer.vocab_size(); ++i) {
      const auto id = static_cast<int32_t>(i);
      std::string bytes(tokenizer.token_bytes(id));
      const bool is_mark = std::ranges::find(options.marks, bytes) != options.marks.end();
      const bool ends = std::ranges::find(options.end_tokens, id) != options.end_tokens.end();
      // The library takes an empty token for one that is part of no text.
      if (ends || (tokenizer.is_special(id) && !is_mark)) bytes.clear();
      tokens.push_back(std::move(bytes));
    }
    return tokens;
  }

  void make_library() {
    const xgrammar::TokenizerInfo info(vocabulary(), xgrammar::VocabType::RAW, std::nullopt,
                                       options.end_tokens);
    const int threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 8u));
    library = std::make_shared<xgrammar::GrammarCompiler>(info, threads, /*cache_enabled=*/false);
  }

  static xgrammar::CompiledGrammar compiled(xgrammar::GrammarCompiler& library,
                                            const GrammarText& text) {
    const auto of_schema = [&](const std::string& schema) {
      return library.CompileJSONSchema(schema, /*any_whitespace=*/true, std::nullopt, std::nullopt,
                                       /*strict_mode=*/false, kMostBlanks);
    };
    switch (text.kind) {
      case GrammarText::Kind::kJson:
        return of_schema(R"({"type":"object"})");
      case GrammarText::Kind::kJsonSchema:
        return of_schema(checked_json_schema(text.text, "the JSON schema"));
      case GrammarText::Kind::kEbnf:
        return library.CompileGrammar(ebnf_of_gbnf(text.text));
      case GrammarText::Kind::kTags:
        return library.CompileStructuralTag(text.text);
    }
    TWELL_CHECK(false, "a grammar of unknown kind");
  }

  static void run(Job& job, xgrammar::GrammarCompiler& library, int64_t vocab) {
    std::string warning;
    grammar_warning = &warning;
    try {
      xgrammar::CompiledGrammar made = compiled(library, job.text);
      if (warning.empty()) {
        job.grammar =
            Grammar(std::make_shared<const Grammar::Impl>(Grammar::Impl{std::move(made), vocab}));
      } else {
        job.refusal = plain(warning);
      }
    } catch (const InputError& error) {
      job.refusal = error.what();
    } catch (const std::bad_alloc&) {
      job.refusal = "it needs more memory than there is";
    } catch (const std::exception& error) {
      job.refusal = plain(error.what());
    }
    grammar_warning = nullptr;
  }

  // Forgets what was not used for longest. The lock is held.
  void keep_within_limits() {
    State& s = *state;
    while (!s.recent.empty() &&
           (s.recent.size() > options.most_cached || s.cached_bytes > options.most_cached_bytes)) {
      const auto last = s.jobs.find(s.recent.back());
      if (last->second->grammar) s.cached_bytes -= last->second->grammar->bytes();
      s.jobs.erase(last);
      s.recent.pop_back();
    }
  }

  void start_worker() {
    worker = std::thread([state = state, library = library, vocab = tokenizer.vocab_size()] {
      std::unique_lock lock(state->mutex);
      while (true) {
        state->changed.wait(lock, [&] { return state->ends || !state->waiting.empty(); });
        if (state->ends) return;
        const std::shared_ptr<Job> job = std::move(state->waiting.front());
        state->waiting.pop_front();
        state->running = job;
        // The result goes into a job of this thread's own; what others see is set under the lock.
        Job own{.text = job->text};
        lock.unlock();
        run(own, *library, vocab);
        lock.lock();
        if (job->given_up) {
          --state->given_up;
          state->changed.notify_all();
          return;
        }
        state->running.reset();
        job->grammar = std::move(own.grammar);
        job->refusal = std::move(own.refusal);
        state->recent.push_front(job->text);
        if (job->grammar) state->cached_bytes += job->grammar->bytes();
        state->finish(*job);
      }
    });
  }

  void start_watchman() {
    watchman = std::thread([this] {
      State& s = *state;
      std::unique_lock lock(s.mutex);
      while (!s.ends) {
        keep_within_limits();
        std::shared_ptr<Job> first;  // whose time is over first
        for (const auto& [text, job] : s.jobs) {
          if (!job->done && (!first || job->deadline < first->deadline)) first = job;
        }
        if (!first) {
          s.changed.wait(lock);
        } else if (Clock::now() < first->deadline) {
          s.changed.wait_until(lock, first->deadline);
        } else {
          give_up(first);
        }
      }
    });
  }

  GrammarOrder order(const GrammarText& text) {
    TWELL_REQUIRE(text.text.size() <= options.most_text_bytes,
                  "a grammar of {} bytes; at most {} are taken", text.text.size(),
                  options.most_text_bytes);
    State& s = *state;
    const std::lock_guard lock(s.mutex);
    if (const auto found = s.jobs.find(text); found != s.jobs.end()) {
      const std::shared_ptr<Job> job = found->second;
      if (job->done) {
        s.recent.erase(std::ranges::find(s.recent, text));
        s.recent.push_front(text);
      }
      return GrammarOrder(std::make_unique<GrammarOrder::Impl>(state, job));
    }
    if (s.waiting.size() >= kMostWaiting || s.given_up > kMostGivenUp) {
      throw GrammarBusy("other grammars are being compiled; try again later");
    }
    if (!library) make_library();
    if (!worker.joinable()) start_worker();
    if (!watchman.joinable()) start_watchman();
    auto job =
        std::make_shared<Job>(Job{.text = text, .deadline = Clock::now() + options.most_time});
    s.jobs.emplace(text, job);
    s.waiting.push_back(job);
    s.changed.notify_all();
    return GrammarOrder(std::make_unique<GrammarOrder::Impl>(state, std::move(job)));
  }

  // The lock is held.
  void give_up(const std::shared_ptr<Job>& job) {
    State& s = *state;
    if (job != s.running) {
      std::erase(s.waiting, job);
      s.jobs.erase(job->text);
      job->busy = true;
      return s.finish(*job);
    }
    leave_running();
    job->refusal = fmt::format("it takes more than {} s to compile",
                               static_cast<double>(options.most_time.count()) / 1000.0);
    s.recent.push_front(job->text);
    start_worker();
    s.finish(*job);
  }
  // Leaves the thread alone with what it compiles. The lock is held.
  void leave_running() {
    std::exchange(state->running, nullptr)->given_up = true;
    ++state->given_up;
    worker.detach();
  }
};

GrammarCompiler::GrammarCompiler(const Tokenizer& tokenizer, GrammarOptions options)
    : impl_(std::make_unique<Impl>(tokenizer, std::move(options))) {}

GrammarCompiler::~GrammarCompiler() {
  {
    std::unique_lock lock(impl_->state->mutex);
    impl_->state->ends = true;
    impl_->state->changed.notify_all();
    impl_->state->changed.wait_for(
        lock, kGoodbye, [&] { return impl_->state->given_up == 0 && !impl_->state->running; });
    if (impl_->state->running) impl_->leave_running();
  }
  if (impl_->watchman.joinable()) impl_->watchman.join();
  if (impl_->worker.joinable()) impl_->worker.join();
}

GrammarOrder GrammarCompiler::order(const GrammarText& text) { return impl_->order(text); }
bool GrammarCompiler::available() { return true; }

}  // namespace twell

#else  // a build without XGrammar

namespace twell {

struct Grammar::Impl {};
std::unique_ptr<TokenFilter> Grammar::filter(std::span<const int32_t>) const { return nullptr; }
int64_t Grammar::bytes() const { return 0; }

struct GrammarOrder::Impl {};
GrammarOrder::GrammarOrder(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GrammarOrder::~GrammarOrder() = default;
GrammarOrder::GrammarOrder(GrammarOrder&&) noexcept = default;
bool GrammarOrder::is_ready() const { return true; }
void GrammarOrder::notify(std::function<void()> ready) { ready(); }
Grammar GrammarOrder::get() { return Grammar(nullptr); }

struct GrammarCompiler::Impl {};
GrammarCompiler::GrammarCompiler(const Tokenizer&, GrammarOptions) {}
GrammarCompiler::~GrammarCompiler() = default;
GrammarOrder GrammarCompiler::order(const GrammarText&) {
  throw InputError(
      "this build has no grammars: run scripts/setup.sh, which fetches XGrammar, and build again");
}
bool GrammarCompiler::available() { return false; }

}  // namespace twell

#endif
