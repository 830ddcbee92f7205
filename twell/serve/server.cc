// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/server.h"

#include <fmt/core.h>

#include <algorithm>
#include <ctime>
#include <exception>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "twell/base/error.h"
#include "twell/infer/generate.h"
#include "twell/infer/scheduler.h"
#include "twell/serve/answers.h"
#include "twell/serve/metrics.h"
#include "twell/serve/openai.h"
#include "twell/serve/page.h"

namespace twell {
namespace {

using nlohmann::ordered_json;
using std::chrono::milliseconds;

constexpr int64_t kCompletionTokens = 16;     // OpenAI's default of max_tokens
constexpr milliseconds kConnectionCheck{20};  // how often a waiting request looks at its client
constexpr milliseconds kPoll{20};             // how often run() looks at its flags
// Time for cancelled requests to report their end to clients that read slowly.
constexpr std::chrono::seconds kGoodbye{5};

// The most that a byte of a JSON text takes as values: "[]," is a value of 16 bytes with a list of
// 32, in lists that grow by doubling.
constexpr int64_t kParsedBytes = 40;

constexpr const char* kServerSentEvents = "text/event-stream";
constexpr const char* kOneModel = "/v1/models/";

std::string event_text(const ordered_json& json) { return "data: " + to_text(json) + "\n\n"; }

HttpReply json_reply(const ordered_json& json) { return {.body = to_text(json)}; }

HttpReply error_reply(const ApiError& error) {
  HttpReply reply{.status = error.status, .body = to_text(error_json(error))};
  if (error.status == 401) reply.headers.emplace_back("WWW-Authenticate", "Bearer");
  if (error.status == 503) reply.headers.emplace_back("Retry-After", "1");
  return reply;
}

ApiError overloaded() {
  return {503, "the server has no room for the request now; try again later", {}, "overloaded"};
}
ApiError answer_too_large() {
  return {503,
          "the server has no memory for the answer now; ask for fewer choices, tokens or "
          "log-probabilities, or try again later",
          {},
          "overloaded"};
}

// The client has closed the connection, so nobody reads the reply.
struct ClientGone {};

// Writes the answer of one kind of completion, as a whole or in chunks.
class Format {
 public:
  virtual ~Format() = default;
  // A choice of a chunk: what the event adds; null when it adds nothing that is shown.
  virtual ordered_json delta(const AnswerEvent& event) = 0;
  // A choice of a whole answer, after add() of each of its events.
  virtual void add(const AnswerEvent& event) = 0;
  virtual ordered_json choice(size_t sequence) = 0;
  virtual const char* object(bool chunk) const = 0;
  virtual const char* id_prefix() const = 0;
};

// What a choice collects.
struct Collected {
  explicit Collected(const Tokenizer& tokenizer) : completion_log_probs(tokenizer) {}

  std::string text;
  std::optional<StopReason> stop;
  CompletionLogProbs completion_log_probs;
  ordered_json chat_log_probs = ordered_json::array();
  bool begun = false;
};

class CompletionFormat final : public Format {
 public:
  // What an echoed prompt puts in front of its choices.
  struct Echo {
    int32_t first_token = 0;
    std::string text;
  };
  // echoes: of each prompt, or none. Choices of a prompt are consecutive sequences.
  CompletionFormat(const Tokenizer& tokenizer, bool log_probs, int64_t prompts, int64_t choices,
                   std::vector<Echo> echoes)
      : log_probs_(log_probs),
        choices_(static_cast<size_t>(choices)),
        echoes_(std::move(echoes)),
        collected_(static_cast<size_t>(prompts * choices), Collected(tokenizer)) {}

  ordered_json delta(const AnswerEvent& event) override {
    add(event);
    Collected& collected = collected_[event.sequence];
    if (collected.text.empty() && !event.stop && !log_probs_) return nullptr;
    ordered_json out = choice(event.sequence);
    collected.text.clear();
    return out;
  }
  void add(const AnswerEvent& event) override {
    Collected& collected = collected_[event.sequence];
    if (!std::exchange(collected.begun, true) && !echoes_.empty()) {
      const Echo& echo = echoes_[event.sequence / choices_];
      collected.text = echo.text;
      if (log_probs_) {
        collected.completion_log_probs.add_first(echo.first_token);
        for (const TokenLogProbs& token : event.prompt_log_probs) {
          collected.completion_log_probs.add(token);
        }
      }
    }
    collected.text += event.text;
    collected.stop = event.stop;
    if (event.log_probs) collected.completion_log_probs.add(*event.log_probs);
  }
  ordered_json choice(size_t sequence) override {
    Collected& collected = collected_[sequence];
    return {{"index", sequence},
            {"text", collected.text},
            {"logprobs", log_probs_ ? collected.completion_log_probs.take() : ordered_json()},
            {"finish_reason", finish_reason(collected.stop)}};
  }
  const char* object(bool) const override { return "text_completion"; }
  const char* id_prefix() const override { return "cmpl"; }

 private:
  bool log_probs_;
  size_t choices_;
  std::vector<Echo> echoes_;
  std::vector<Collected> collected_;
};

class ChatFormat final : public Format {
 public:
  ChatFormat(const Tokenizer& tokenizer, bool log_probs, int64_t choices)
      : tokenizer_(tokenizer),
        log_probs_(log_probs),
        collected_(static_cast<size_t>(choices), Collected(tokenizer)) {}

  ordered_json delta(const AnswerEvent& event) override {
    Collected& collected = collected_[event.sequence];
    const bool first = !collected.begun;
    add(event);
    if (collected.text.empty() && !event.stop && !log_probs_ && !first) return nullptr;
    ordered_json content = ordered_json::object();
    if (first) content["role"] = "assistant";
    if (first || !collected.text.empty()) content["content"] = std::exchange(collected.text, {});
    return {{"index", event.sequence},
            {"delta", std::move(content)},
            {"logprobs", take_log_probs(collected)},
            {"finish_reason", finish_reason(event.stop)}};
  }
  void add(const AnswerEvent& event) override {
    Collected& collected = collected_[event.sequence];
    collected.begun = true;
    collected.text += event.text;
    collected.stop = event.stop;
    if (event.log_probs) {
      collected.chat_log_probs.push_back(chat_log_prob(tokenizer_, *event.log_probs));
    }
  }
  ordered_json choice(size_t sequence) override {
    Collected& collected = collected_[sequence];
    return {{"index", sequence},
            {"message", {{"role", "assistant"}, {"content", collected.text}}},
            {"logprobs", take_log_probs(collected)},
            {"finish_reason", finish_reason(collected.stop)}};
  }
  const char* object(bool chunk) const override {
    return chunk ? "chat.completion.chunk" : "chat.completion";
  }
  const char* id_prefix() const override { return "chatcmpl"; }

 private:
  ordered_json take_log_probs(Collected& collected) const {
    if (!log_probs_) return nullptr;
    return {{"content", std::exchange(collected.chat_log_probs, ordered_json::array())}};
  }

  const Tokenizer& tokenizer_;
  bool log_probs_;
  std::vector<Collected> collected_;
};

// An HTTP request and everything that its answer needs until the last byte is sent.
struct Job {
  // The events of a stream are dropped once they are sent.
  Job(Scheduler& scheduler, Waker& waker, MemoryBudget& budget, bool stream)
      : echoes(budget), answers(scheduler, waker, budget, !stream) {}

  MemoryBudget::Share echoes;
  Answers answers;
  std::unique_ptr<Format> format;
  std::vector<Usage> usage;         // of each sequence so far
  std::vector<bool> counts_prompt;  // choices share their prompt
  AnswerOptions options;
  ordered_json head;  // id, object, created, model
  std::shared_ptr<void> in_progress;

  ordered_json usage_so_far() const {
    int64_t prompt = 0, tokens = 0, cached = 0;
    for (size_t i = 0; i < usage.size(); ++i) {
      tokens += usage[i].tokens;
      if (!counts_prompt[i]) continue;
      prompt += usage[i].prompt_tokens;
      cached += usage[i].cached_tokens;
    }
    return usage_json(prompt, tokens, cached);
  }
};

std::optional<ApiError> failure_of(const AnswerEvent& event) {
  if (event.stop == StopReason::kFailed) return ApiError(500, "the model failed");
  if (event.stop == StopReason::kNotFinite) return ApiError(500, std::string(kNoTokenReason));
  if (event.stop == StopReason::kCancelled) return ApiError(503, "the server is stopping");
  return std::nullopt;
}

}  // namespace

struct Server::Impl {
  Impl(Session& session_in, const Tokenizer& tokenizer_in, const ChatTemplate* chat_in,
       ServerOptions options_in)
      : session(session_in),
        tokenizer(tokenizer_in),
        chat(chat_in),
        options(std::move(options_in)),
        memory(options.request_bytes),
        scheduler(session, tokenizer,
                  {.max_waiting = options.max_waiting, .prefill_tokens = options.prefill_tokens}),
        http(
            options.http,
            [](int status, const std::string& message) {
              return to_text(error_json(ApiError(status, message)));
            },
            [this](const HttpRequest& request) { return admit(request); }) {
    for (int64_t id = 0; id < tokenizer.vocab_size(); ++id) {
      const auto bytes = std::ssize(tokenizer.token_bytes(static_cast<int32_t>(id)));
      longest_token = std::max(longest_token, bytes);
    }
    if (options.joules) first_joules = options.joules();
    const auto get = [this](const std::string& path, auto handler) {
      http.get(path, [this, path, handler](const HttpRequest& request) {
        return counted(path, handler(request));
      });
    };
    const auto post = [this](const std::string& path, auto handler) {
      http.post(path, [this, path, handler](const HttpRequest& request) {
        return counted(path, answer(request, handler));
      });
    };
    get("/", [](const HttpRequest&) {
      return HttpReply{.type = "text/html; charset=utf-8",
                       .body = std::string(page_html()),
                       .headers = {{"Content-Security-Policy",
                                    "default-src 'none'; style-src 'unsafe-inline'; script-src "
                                    "'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'"},
                                   {"X-Content-Type-Options", "nosniff"}}};
    });
    get("/health", [this](const HttpRequest&) { return health(); });
    get("/metrics", [this](const HttpRequest&) { return metrics(); });
    get("/activity", [this](const HttpRequest&) { return activity(); });
    get("/v1/models", [this](const HttpRequest&) {
      return json_reply({{"object", "list"}, {"data", {model_json()}}});
    });
    http.get_below(kOneModel, [this](const HttpRequest& request) {
      const std::string name = request.path.substr(std::string(kOneModel).size());
      return counted(kOneModel, name == options.model ? json_reply(model_json())
                                                      : error_reply(no_such_model(name)));
    });
    post("/v1/completions", [this](const HttpRequest& request) { return complete(request); });
    post("/v1/chat/completions", [this](const HttpRequest& request) { return converse(request); });
    post("/tokenize", [this](const HttpRequest& request) { return tokenize(request); });
    post("/detokenize", [this](const HttpRequest& request) { return detokenize(request); });
  }

  // Before a request's body is read.
  std::optional<HttpReply> admit(const HttpRequest& request) {
    if (request.path == "/" || request.path == "/health") return std::nullopt;
    const bool model = request.path.starts_with(kOneModel);
    const std::string path = model ? kOneModel : request.path;
    if (!options.keys.allow(request.authorization)) {
      return counted(path, error_reply(ApiError(401,
                                                "the API key is missing or wrong: send "
                                                "Authorization: Bearer KEY",
                                                {}, "invalid_api_key")));
    }
    if (stopping && request.method == "POST") {
      return counted(path, error_reply(ApiError(503, "the server is stopping")));
    }
    return std::nullopt;
  }

  HttpReply counted(const std::string& path, HttpReply reply) {
    const std::lock_guard lock(mutex);
    ++replies[{path, reply.status}];
    return reply;
  }

  template <typename Handler>
  HttpReply answer(const HttpRequest& request, const Handler& handler) {
    try {
      return handler(request);
    } catch (const ApiError& error) {
      return error_reply(error);
    } catch (const InputError& error) {
      return error_reply(ApiError(400, error.what()));
    } catch (const ClientGone&) {
      constexpr int kClientClosedRequest = 499;  // as nginx counts it
      return {.status = kClientClosedRequest};
    } catch (const std::bad_alloc&) {
      return error_reply(ApiError(503, "the request needs more memory than there is"));
    }
  }

  ApiError no_such_model(const std::string& name) const {
    return {404, fmt::format("there is no model \"{}\" here, but \"{}\"", name, options.model),
            "model", "model_not_found"};
  }
  void check_model(const std::string& name) const {
    if (!name.empty() && name != options.model) throw no_such_model(name);
  }

  ordered_json model_json() const {
    return {{"id", options.model},
            {"object", "model"},
            {"created", started},
            {"owned_by", "twell"},
            {"max_model_len", session.capacity()}};
  }

  HttpReply health() const {
    if (!stopping) return json_reply({{"status", "ok"}});
    return {.status = 503, .body = to_text({{"status", "stopping"}})};
  }

  HttpReply metrics() {
    ServerMetrics all{.scheduler = scheduler.stats()};
    if (options.joules) all.joules = options.joules() - first_joules;
    {
      const std::lock_guard lock(mutex);
      all.replies = replies;
    }
    return {.type = "text/plain; version=0.0.4; charset=utf-8", .body = metrics_text(all)};
  }

  HttpReply activity() const {
    const SchedulerStats stats = scheduler.stats();
    ordered_json layers = ordered_json::array();
    for (const ActiveNeurons& layer : stats.layers) {
      layers.push_back({{"active", layer.per_token}, {"sparse", layer.sparse}});
    }
    return json_reply({{"model", options.model},
                       {"chat", chat != nullptr},
                       {"neurons", session.config().ffn},
                       {"tokens", stats.prompt_tokens + stats.tokens},
                       {"running", stats.running},
                       {"waiting", stats.waiting},
                       {"layers", std::move(layers)}});
  }

  std::vector<int32_t> encode(const std::string& text, bool begin_token, const char* field) const {
    // Such a text has too many tokens however it is split, so it is not tokenized.
    if (std::ssize(text) > 4 * longest_token * session.capacity()) {
      throw too_long(fmt::format("{} bytes", text.size()), field);
    }
    return prompt_ids(session.config(), tokenizer, text, begin_token);
  }
  ApiError too_long(const std::string& size, const char* field) const {
    return {400,
            fmt::format("the prompt is too long: it has {}, and the context of {} tokens must hold "
                        "it and a new token",
                        size, session.capacity()),
            field, "context_length_exceeded"};
  }

  std::string render(const std::string& messages_json) const {
    if (chat == nullptr) {
      throw ApiError(400, "this model has no chat template; use /v1/completions", "messages");
    }
    return chat->render_json(messages_json, /*add_generation_prompt=*/true);
  }

  // The request of a sequence; its seed is that of the first choice.
  GenerationRequest generation(std::vector<int32_t> prompt, const AnswerOptions& wanted,
                               int64_t max_tokens, const std::vector<int32_t>& stop_tokens,
                               const char* field) const {
    const int64_t new_tokens = max_tokens == 0 ? 0 : 1;
    if (std::ssize(prompt) + new_tokens > session.capacity()) {
      throw too_long(fmt::format("{} tokens", prompt.size()), field);
    }
    return {.prompt = std::move(prompt),
            .sampler = wanted.sampler,
            .max_tokens = max_tokens,
            .stop_at_end_of_text = !wanted.ignore_end_of_text,
            .stop_tokens = wanted.ignore_end_of_text ? std::vector<int32_t>() : stop_tokens,
            .stop_strings = wanted.stop,
            .log_probs = wanted.log_probs,
            .share_beginning = !wanted.seeded};
  }

  std::shared_ptr<Job> new_job(AnswerOptions wanted) {
    auto job = std::make_shared<Job>(scheduler, waker, memory, wanted.stream);
    if (!wanted.seeded) wanted.sampler.seed = std::random_device()();
    job->options = std::move(wanted);
    ++in_progress;
    job->in_progress = std::shared_ptr<void>(nullptr, [this](void*) { --in_progress; });
    return job;
  }

  void add_choices(Job& job, const GenerationRequest& request) {
    for (int64_t choice = 0; choice < job.options.choices; ++choice) {
      GenerationRequest one = request;
      one.sampler.seed += static_cast<uint64_t>(choice);
      if (!job.answers.add(std::move(one))) throw overloaded();
      job.usage.emplace_back();
      job.counts_prompt.push_back(choice == 0);
    }
  }

  // What `parse` makes of the body, whose values as JSON take memory for a moment.
  template <typename Parse>
  auto parsed(const std::string& body, const Parse& parse) {
    MemoryBudget::Share values(memory);
    if (!values.grow(kParsedBytes * std::ssize(body))) throw overloaded();
    return parse(body);
  }

  HttpReply complete(const HttpRequest& http_request) {
    CompletionRequest request = parsed(http_request.body, [this](const std::string& body) {
      return parse_completion(body, options.max_waiting);
    });
    check_model(request.options.model);
    const std::shared_ptr<Job> job = new_job(std::move(request.options));
    const bool log_probs = job->options.log_probs.has_value();
    const int64_t max_tokens = job->options.max_tokens.value_or(kCompletionTokens);
    std::vector<GenerationRequest> generations;
    std::vector<CompletionFormat::Echo> echoes;
    for (auto& prompt : request.prompts) {
      std::vector<int32_t> ids;
      std::string text;
      if (auto* given = std::get_if<std::string>(&prompt)) {
        ids = encode(*given, request.begin_token, "prompt");
        text = std::move(*given);
      } else {
        ids = std::move(std::get<std::vector<int32_t>>(prompt));
        check_ids(ids, "prompt");
        if (request.echo) text = tokenizer.decode(ids);
      }
      if (request.echo) {
        // Each choice has the text as a value and as JSON.
        if (!job->echoes.grow(4 * job->options.choices * std::ssize(text))) {
          throw answer_too_large();
        }
        echoes.push_back({.first_token = ids.empty() ? 0 : ids.front(), .text = std::move(text)});
      }
      GenerationRequest one =
          generation(std::move(ids), job->options, max_tokens, options.stop_tokens, "prompt");
      if (request.echo && log_probs) one.prompt_log_probs = job->options.log_probs;
      if (max_tokens == 0 && !log_probs) one.prompt_log_probs = 0;
      generations.push_back(std::move(one));
    }
    job->format = std::make_unique<CompletionFormat>(
        tokenizer, log_probs, std::ssize(request.prompts), job->options.choices, std::move(echoes));
    for (const GenerationRequest& one : generations) add_choices(*job, one);
    return reply(job, http_request);
  }

  HttpReply converse(const HttpRequest& http_request) {
    ChatRequest request = parsed(http_request.body, [this](const std::string& body) {
      return parse_chat(body, options.max_waiting);
    });
    check_model(request.options.model);
    const std::shared_ptr<Job> job = new_job(std::move(request.options));
    // The template writes the begin token itself.
    std::vector<int32_t> ids = encode(render(request.messages_json), false, "messages");
    job->format = std::make_unique<ChatFormat>(tokenizer, job->options.log_probs.has_value(),
                                               job->options.choices);
    add_choices(*job, generation(std::move(ids), job->options,
                                 job->options.max_tokens.value_or(session.capacity()),
                                 options.chat_stop_tokens, "messages"));
    return reply(job, http_request);
  }

  HttpReply reply(const std::shared_ptr<Job>& job, const HttpRequest& request) {
    if (!job->answers.submit()) throw overloaded();
    job->head = {
        {"id", fmt::format("{}-{:08x}{:06x}", job->format->id_prefix(), started, ++replied)},
        {"object", job->format->object(job->options.stream)},
        {"created", static_cast<int64_t>(std::time(nullptr))},
        {"model", options.model}};
    if (!job->options.stream) return whole_reply(*job, request);
    return {.type = kServerSentEvents,
            .headers = {{"Cache-Control", "no-cache"}},
            .stream = [job, connected = request.connected](const HttpReply::Write& write) {
              stream_chunks(*job, connected, write);
            }};
  }

  static HttpReply whole_reply(Job& job, const HttpRequest& request) {
    while (!job.answers.done()) {
      for (const AnswerEvent& event : job.answers.take(kConnectionCheck)) {
        if (const std::optional<ApiError> failure = failure_of(event)) throw *failure;
        job.usage[event.sequence] = event.usage;
        job.format->add(event);
      }
      if (job.answers.overflowed()) throw answer_too_large();
      if (!request.connected()) throw ClientGone();
    }
    ordered_json choices = ordered_json::array();
    for (size_t i = 0; i < job.usage.size(); ++i) choices.push_back(job.format->choice(i));
    ordered_json body = std::move(job.head);
    body["choices"] = std::move(choices);
    body["usage"] = job.usage_so_far();
    return json_reply(body);
  }

  // Returns early when the client has gone; the end of the job cancels its sequences.
  static void stream_chunks(Job& job, const std::function<bool()>& connected,
                            const HttpReply::Write& write) {
    const AnswerOptions& wanted = job.options;
    const auto chunk = [&](ordered_json choices, bool usage) {
      ordered_json out = job.head;
      out["choices"] = std::move(choices);
      if (usage) {
        out["usage"] = job.usage_so_far();
      } else if (wanted.stream_usage) {
        out["usage"] = nullptr;
      }
      return event_text(out);
    };
    while (!job.answers.done()) {
      std::string piece;
      for (const AnswerEvent& event : job.answers.take(kConnectionCheck)) {
        if (const std::optional<ApiError> failure = failure_of(event)) {
          write(piece + event_text(error_json(*failure)) + "data: [DONE]\n\n");
          return;
        }
        job.usage[event.sequence] = event.usage;
        ordered_json choice = job.format->delta(event);
        if (choice.is_null()) continue;
        piece += chunk(ordered_json::array({std::move(choice)}), wanted.stream_continuous_usage);
      }
      if (job.answers.overflowed()) {
        write(piece + event_text(error_json(answer_too_large())) + "data: [DONE]\n\n");
        return;
      }
      if (!connected() || (!piece.empty() && !write(piece))) return;
    }
    std::string end;
    if (wanted.stream_usage) end = chunk(ordered_json::array(), true);
    write(end + "data: [DONE]\n\n");
  }

  void check_ids(const std::vector<int32_t>& ids, const char* field) const {
    for (const int32_t id : ids) {
      if (id >= session.config().vocab_size) {
        throw ApiError(400,
                       fmt::format("{}: token {} is not among the model's {} tokens", field, id,
                                   session.config().vocab_size),
                       field);
      }
    }
  }

  HttpReply tokenize(const HttpRequest& http_request) {
    const TokenizeRequest request = parsed(http_request.body, parse_tokenize);
    check_model(request.model);
    std::vector<int32_t> ids;
    tokenizer.encode_sequence(request.prompt ? *request.prompt : render(*request.messages_json),
                              ids, request.begin_token);
    return json_reply(
        {{"count", ids.size()}, {"max_model_len", session.capacity()}, {"tokens", ids}});
  }

  HttpReply detokenize(const HttpRequest& http_request) {
    const std::vector<int32_t> ids = parsed(http_request.body, parse_detokenize);
    for (const int32_t id : ids) {
      if (id >= tokenizer.vocab_size()) {
        throw ApiError(400,
                       fmt::format("tokens: {} is not among the tokenizer's {} tokens", id,
                                   tokenizer.vocab_size()),
                       "tokens");
      }
    }
    return json_reply({{"prompt", tokenizer.decode(ids)}});
  }

  void wait_until_idle(std::chrono::steady_clock::time_point deadline) const {
    while (in_progress > 0 && !failed && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(kPoll);
    }
  }

  void run(const std::atomic<bool>& stop) {
    std::exception_ptr failure, http_failure;
    std::thread engine([&] {
      try {
        scheduler.run();
      } catch (...) {
        failure = std::current_exception();
        // Ends the requests that arrived since: a step without requests does not use the model.
        scheduler.drain();
        scheduler.cancel_all();
        scheduler.step();
        failed = true;
      }
    });
    std::atomic<bool> listens = true;
    std::thread connections([&] {
      try {
        http.run();
      } catch (...) {
        http_failure = std::current_exception();
      }
      listens = false;
    });
    while (!stop && !failed && listens) std::this_thread::sleep_for(kPoll);
    stopping = true;
    wait_until_idle(std::chrono::steady_clock::now() + options.drain);
    scheduler.cancel_all();
    scheduler.drain();
    wait_until_idle(std::chrono::steady_clock::now() + kGoodbye);
    http.stop();
    connections.join();
    engine.join();
    if (failure) std::rethrow_exception(failure);
    if (http_failure) std::rethrow_exception(http_failure);
  }

  Session& session;
  const Tokenizer& tokenizer;
  const ChatTemplate* chat;
  const ServerOptions options;
  const int64_t started = std::time(nullptr);
  MemoryBudget memory;
  Waker waker;
  Scheduler scheduler;
  HttpServer http;
  int64_t longest_token = 1;  // bytes
  double first_joules = 0.0;
  std::atomic<bool> stopping{false}, failed{false};
  std::atomic<int64_t> in_progress{0}, replied{0};
  std::mutex mutex;  // guards replies
  std::map<std::pair<std::string, int>, int64_t> replies;
};

Server::Server(Session& session, const Tokenizer& tokenizer, const ChatTemplate* chat,
               ServerOptions options)
    : impl_(std::make_unique<Impl>(session, tokenizer, chat, std::move(options))) {}

Server::~Server() = default;

int Server::bind(const std::string& host, int port) { return impl_->http.bind(host, port); }

void Server::run(const std::atomic<bool>& stop) { impl_->run(stop); }

}  // namespace twell
