// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/routes.h"

#include <fmt/core.h>

#include <algorithm>
#include <ctime>
#include <random>

#include "twell/base/error.h"
#include "twell/grammar/json_schema.h"
#include "twell/infer/generate.h"
#include "twell/serve/metrics.h"
#include "twell/serve/openai.h"
#include "twell/serve/page.h"
#include "twell/serve/responses.h"

namespace twell {

using nlohmann::ordered_json;

// The sequences of a request, their format, and what has become of them so far.
struct Job {
  // The events of a stream are dropped once they are sent.
  Job(Scheduler& scheduler, Waker& waker, MemoryBudget& budget, bool stream)
      : echoes(budget), answers(scheduler, waker, budget, stream) {}

  MemoryBudget::Share echoes;
  Answers answers;
  std::vector<GenerationRequest> requests;    // one per prompt, until they are handed over
  std::shared_ptr<MemoryBudget::Share> body;  // as long as the requests wait
  std::unique_ptr<Format> format;             // or
  std::optional<ResponseFormat> response;
  std::vector<Usage> usage;         // of each sequence so far
  std::vector<bool> counts_prompt;  // choices share their prompt
  AnswerOptions options;
  std::optional<GrammarOrder> order;
  std::optional<Grammar> grammar;   // that the sequences are drawn by,
  std::vector<int32_t> end_tokens;  // until one of these
  uint64_t client = 0;              // GenerationRequest::client
  ordered_json head;                // id, object, created, model
  std::shared_ptr<void> in_progress;
  std::shared_ptr<HttpUsage> http_usage = std::make_shared<HttpUsage>();

  // For the log of requests.
  void note_usage() const {
    int64_t prompt = 0, tokens = 0;
    for (size_t i = 0; i < usage.size(); ++i) {
      tokens += usage[i].tokens;
      if (counts_prompt[i]) prompt += usage[i].prompt_tokens;
    }
    *http_usage = {.prompt_tokens = prompt, .completion_tokens = tokens};
  }
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

namespace {

constexpr int64_t kCompletionTokens = 16;  // OpenAI's default of max_tokens

// The most that a byte of a JSON text takes as values: "[]," is a value of 16 bytes with a list of
// 32, in lists that grow by doubling.
constexpr int64_t kParsedBytes = 40;

constexpr const char* kServerSentEvents = "text/event-stream";
constexpr const char* kLastEvent = "data: [DONE]\n\n";
constexpr const char* kResponses = "/v1/responses";
constexpr const char* kOneModel = "/v1/models/";
constexpr const char* kSchemaName = "the JSON schema";

std::vector<int32_t> joined(std::vector<int32_t> some, const std::vector<int32_t>& others) {
  some.insert(some.end(), others.begin(), others.end());
  std::ranges::sort(some);
  some.erase(std::unique(some.begin(), some.end()), some.end());
  return some;
}

ChatInput chat_input(const ChatRequest& request) {
  return {.messages = request.messages_json,
          .tools = request.tools_json,
          .variables = request.variables_json};
}

// All tokens that end a text.
std::vector<int32_t> end_tokens(const Tokenizer& tokenizer, const std::vector<int32_t>& others) {
  std::vector<int32_t> ids;
  if (tokenizer.eos_token() >= 0) ids.push_back(tokenizer.eos_token());
  return joined(std::move(ids), others);
}

std::string event_text(const ordered_json& event) { return "data: " + to_text(event) + "\n\n"; }

HttpReply json_reply(const ordered_json& body) { return {.body = to_text(body)}; }

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
std::optional<ApiError> failure_of(const AnswerEvent& event) {
  if (event.stop == StopReason::kFailed) return ApiError(500, "the model failed");
  if (event.stop == StopReason::kNotFinite) return ApiError(500, std::string(kNoTokenReason));
  if (event.stop == StopReason::kNoneFits) return ApiError(400, std::string(kNoneFitsReason));
  if (event.stop == StopReason::kCancelled) return ApiError(503, "the server is stopping");
  return std::nullopt;
}

// Calls what a grammar is needed for; its refusal names the request's field.
template <typename Use>
auto of_grammar(const AnswerOptions& options, const Use& use) {
  try {
    return use();
  } catch (const InputError& error) {
    throw ApiError(400, fmt::format("{}: {}", options.grammar_field, error.what()),
                   options.grammar_field);
  } catch (const GrammarBusy& error) {
    throw ApiError(503, error.what(), options.grammar_field, "overloaded");
  }
}

// Calls what makes a reply; an error of the request becomes its reply.
template <typename Make>
HttpReply reply_or_error(const Make& make) {
  try {
    return make();
  } catch (const ApiError& error) {
    return error_reply(error);
  } catch (const InputError& error) {
    return error_reply(ApiError(400, error.what()));
  } catch (const std::bad_alloc&) {
    return error_reply(ApiError(503, "the request needs more memory than there is"));
  }
}

// The answer to a request as one JSON text.
class WholeAnswer final : public HttpLater {
 public:
  using Count = std::function<HttpReply(HttpReply)>;

  WholeAnswer(std::unique_ptr<Job> job, Count count)
      : job_(std::move(job)), count_(std::move(count)) {}
  void notify(std::function<void()> ready) override { job_->answers.notify(std::move(ready)); }

  std::optional<HttpReply> reply() override {
    bool waits = false;
    HttpReply made = reply_or_error([&]() -> HttpReply {
      for (const AnswerEvent& event : job_->answers.take()) {
        if (const std::optional<ApiError> failure = failure_of(event)) throw *failure;
        job_->usage[event.sequence] = event.usage;
        job_->response ? job_->response->add(event) : job_->format->add(event);
      }
      if (job_->answers.overflowed()) throw answer_too_large();
      waits = !job_->answers.done();
      if (waits) return {};
      HttpReply whole = json_reply(job_->response ? job_->response->response() : completion());
      job_->note_usage();
      whole.usage = job_->http_usage;
      return whole;
    });
    if (waits) return std::nullopt;
    return count_(std::move(made));
  }

 private:
  ordered_json completion() {
    ordered_json choices = ordered_json::array();
    for (size_t i = 0; i < job_->usage.size(); ++i) choices.push_back(job_->format->choice(i));
    ordered_json body = std::move(job_->head);
    body["choices"] = std::move(choices);
    body["usage"] = job_->usage_so_far();
    return body;
  }

  std::unique_ptr<Job> job_;
  Count count_;
};

// The answer to a request as server-sent events: chunks of a completion, or the typed events of a
// response.
class StreamedAnswer final : public HttpStream {
 public:
  explicit StreamedAnswer(std::unique_ptr<Job> job) : job_(std::move(job)) {}
  void notify(std::function<void()> ready) override { job_->answers.notify(std::move(ready)); }

  State next(std::string& piece) override {
    if (!std::exchange(begun_, true) && job_->response) piece += job_->response->begin();
    for (const AnswerEvent& event : job_->answers.take()) {
      if (const std::optional<ApiError> failure = failure_of(event)) return fail(*failure, piece);
      job_->usage[event.sequence] = event.usage;
      piece += job_->response ? job_->response->next(event) : delta(event);
    }
    job_->note_usage();
    if (job_->answers.overflowed()) return fail(answer_too_large(), piece);
    if (!job_->answers.done()) return State::kWaits;
    if (job_->response) return State::kEnds;
    if (job_->options.stream_usage) piece += chunk(ordered_json::array(), true);
    piece += kLastEvent;
    return State::kEnds;
  }

 private:
  State fail(const ApiError& error, std::string& piece) {
    piece +=
        job_->response ? job_->response->failed(error) : event_text(error_json(error)) + kLastEvent;
    return State::kEnds;
  }
  std::string delta(const AnswerEvent& event) {
    ordered_json choice = job_->format->delta(event);
    if (choice.is_null()) return {};
    return chunk(ordered_json::array({std::move(choice)}), job_->options.stream_continuous_usage);
  }
  std::string chunk(ordered_json choices, bool usage) const {
    ordered_json out = job_->head;
    out["choices"] = std::move(choices);
    if (usage) {
      out["usage"] = job_->usage_so_far();
    } else if (job_->options.stream_usage) {
      out["usage"] = nullptr;
    }
    return event_text(out);
  }

  std::unique_ptr<Job> job_;
  bool begun_ = false;
};

// A job whose grammar is being compiled; submit hands it over.
class WaitsForGrammar final : public HttpLater {
 public:
  using Submit = std::function<HttpReply(std::unique_ptr<Job>)>;

  WaitsForGrammar(std::unique_ptr<Job> job, Submit submit)
      : job_(std::move(job)), submit_(std::move(submit)) {}
  void notify(std::function<void()> ready) override { job_->order->notify(std::move(ready)); }

  std::optional<HttpReply> reply() override {
    if (!job_->order->is_ready()) return std::nullopt;
    return submit_(std::move(job_));
  }

 private:
  std::unique_ptr<Job> job_;
  Submit submit_;
};

}  // namespace

Routes::Routes(Session& session, const Tokenizer& tokenizer, const ChatTemplate* chat,
               const ServerOptions& options, Scheduler& scheduler, Waker& waker,
               MemoryBudget& memory)
    : session_(session),
      tokenizer_(tokenizer),
      chat_(chat),
      options_(options),
      scheduler_(scheduler),
      grammars_(tokenizer, {.end_tokens = end_tokens(
                                tokenizer, joined(options.stop_tokens, options.chat_stop_tokens)),
                            .marks = tool_marks()}),
      waker_(waker),
      memory_(memory),
      started_(std::time(nullptr)),
      hosts_("127.0.0.1", {}),
      fill_in_(find_fill_in_tokens(tokenizer)) {
  for (int64_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const auto bytes = std::ssize(tokenizer.token_bytes(static_cast<int32_t>(id)));
    longest_token_ = std::max(longest_token_, bytes);
  }
  if (options.joules) first_joules_ = options.joules();
}

void Routes::add_to(HttpServer& http) {
  const auto get = [&](const std::string& path, auto handler) {
    http.get(path, [this, path, handler](const HttpRequest&) { return counted(path, handler()); });
  };
  const auto post = [&](const std::string& path, auto handler) {
    http.post(path, [this, path, handler](const HttpRequest& request) {
      return counted(path, reply_or_error([&] { return std::invoke(handler, this, request); }));
    });
  };
  get("/", [] {
    return HttpReply{.type = "text/html; charset=utf-8",
                     .body = std::string(page_html()),
                     .headers = {{"Content-Security-Policy",
                                  "default-src 'none'; style-src 'unsafe-inline'; script-src "
                                  "'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'"},
                                 {"X-Content-Type-Options", "nosniff"}}};
  });
  get("/health", [this] { return health(); });
  get("/metrics", [this] { return metrics(); });
  get("/activity", [this] { return activity(); });
  get("/v1/models", [this] { return json_reply({{"object", "list"}, {"data", {model_json()}}}); });
  http.get_below(kOneModel, [this](const HttpRequest& request) {
    const std::string name = request.path.substr(std::string_view(kOneModel).size());
    return counted(kOneModel, name == options_.model ? json_reply(model_json())
                                                     : error_reply(no_such_model(name)));
  });
  post("/v1/completions", &Routes::complete);
  post("/v1/chat/completions", &Routes::converse);
  post(kResponses, &Routes::respond);
  post("/tokenize", &Routes::tokenize);
  post("/detokenize", &Routes::detokenize);
}

std::optional<HttpReply> Routes::admit(const HttpRequest& request) {
  const bool model = request.path.starts_with(kOneModel);
  const std::string path = model ? kOneModel : request.path;
  // Keys are what foreign pages do not have, so names need not be checked where there are some.
  if (options_.keys.empty() && request.host && !hosts_.allow(*request.host)) {
    return counted(path, error_reply(ApiError(
                             403,
                             "this server is not reached under the name of the Host field; start "
                             "it with --allow-host NAME if it is meant to be",
                             {}, "host_not_allowed")));
  }
  if (request.path == "/" || request.path == "/health") return std::nullopt;
  if (!options_.keys.allow(request.authorization, request.api_key)) {
    return counted(path, error_reply(ApiError(401,
                                              "the API key is missing or wrong: send "
                                              "Authorization: Bearer KEY, or X-Api-Key: KEY",
                                              {}, "invalid_api_key")));
  }
  if (stopping_ && request.method == "POST") {
    return counted(path, error_reply(ApiError(503, "the server is stopping")));
  }
  return std::nullopt;
}

// Counts a reply; one that comes later counts when it is there.
HttpReply Routes::counted(const std::string& path, HttpReply reply) {
  if (reply.later) return reply;
  const std::lock_guard lock(mutex_);
  ++replies_[{path, reply.status}];
  return reply;
}

ApiError Routes::no_such_model(const std::string& name) const {
  return {404, fmt::format("there is no model \"{}\" here, but \"{}\"", name, options_.model),
          "model", "model_not_found"};
}
void Routes::check_model(const std::string& name) const {
  if (!name.empty() && name != options_.model) throw no_such_model(name);
}

ordered_json Routes::model_json() const {
  return {{"id", options_.model},
          {"object", "model"},
          {"created", started_},
          {"owned_by", "twell"},
          {"max_model_len", session_.capacity()}};
}

HttpReply Routes::health() const {
  if (!stopping_) return json_reply({{"status", "ok"}});
  return {.status = 503, .body = to_text({{"status", "stopping"}})};
}

HttpReply Routes::metrics() {
  ServerMetrics all{.scheduler = scheduler_.stats()};
  if (options_.joules) all.joules = options_.joules() - first_joules_;
  {
    const std::lock_guard lock(mutex_);
    all.replies = replies_;
  }
  return {.type = "text/plain; version=0.0.4; charset=utf-8", .body = metrics_text(all)};
}

HttpReply Routes::activity() const {
  const SchedulerStats stats = scheduler_.stats();
  ordered_json layers = ordered_json::array();
  for (const ActiveNeurons& layer : stats.layers) {
    layers.push_back({{"active", layer.per_token}, {"sparse", layer.sparse}});
  }
  return json_reply({{"model", options_.model},
                     {"chat", chat_ != nullptr},
                     {"neurons", session_.config().ffn},
                     {"tokens", stats.prompt_tokens + stats.tokens},
                     {"running", stats.running},
                     {"waiting", stats.waiting},
                     {"layers", std::move(layers)}});
}

std::vector<int32_t> Routes::encode(const std::string& text, bool begin_token,
                                    const char* field) const {
  // Such a text has too many tokens however it is split, so it is not tokenized.
  if (std::ssize(text) > 4 * longest_token_ * session_.capacity()) {
    throw too_long(fmt::format("{} bytes", text.size()), field);
  }
  return prompt_ids(session_.config(), tokenizer_, text, begin_token);
}
ApiError Routes::too_long(const std::string& size, const char* field) const {
  return {400,
          fmt::format("the prompt is too long: it has {}, and the context of {} tokens must hold "
                      "it and a new token",
                      size, session_.capacity()),
          field, "context_length_exceeded"};
}

std::string Routes::render(const ChatInput& input, const char* field) const {
  if (chat_ == nullptr) {
    throw ApiError(
        400,
        options_.no_chat.empty()
            ? "this model has no chat template; use /v1/completions"
            : fmt::format("this model cannot chat; use /v1/completions ({})", options_.no_chat),
        field);
  }
  return chat_->render(input);
}

std::optional<ToolCallReader> Routes::prepare_tools(ChatRequest& request) const {
  if (request.tools.empty()) return std::nullopt;
  if (chat_ == nullptr) render({}, "messages");  // says why
  const std::optional<ToolForm> form = tool_form(chat_->tool_template());
  if (!form) {
    throw ApiError(400,
                   "tools: this model's chat template takes no tools, or has them called in a form "
                   "that this server does not know",
                   "tools");
  }
  AnswerOptions& options = request.options;
  const bool required = request.calls.choice == ToolChoice::kRequired;
  // A grammar of the client's own says what the whole answer is, calls included.
  if (!options.grammar || options.grammar->kind != GrammarText::Kind::kEbnf) {
    if (options.grammar && options.grammar->kind == GrammarText::Kind::kJsonSchema) {
      of_grammar(options, [&] { return checked_json_schema(options.grammar->text, kSchemaName); });
    }
    try {
      options.grammar = tool_grammar(*form, request.tools, request.calls, options.grammar);
    } catch (const InputError& error) {
      throw ApiError(400, fmt::format("tools: {}", error.what()), "tools");
    }
    if (required || options.grammar_field.empty()) options.grammar_field = "tools";
    if (options.grammar && options.ignore_end_of_text) {
      throw ApiError(400, "ignore_eos: does not go with calls of tools", "ignore_eos");
    }
  }
  std::set<std::string> names;
  for (const Tool& tool : request.tools) names.insert(tool.name);
  return ToolCallReader(*form, std::move(names), request.calls.parallel ? INT32_MAX : 1, required);
}

HttpReply Routes::begin(std::unique_ptr<Job> job, const char* path,
                        const std::vector<int32_t>& stop_tokens) {
  const AnswerOptions& options = job->options;
  if (!options.grammar) return submit(std::move(job), path);
  job->end_tokens = end_tokens(tokenizer_, stop_tokens);
  const bool ready = of_grammar(options, [&] {
    job->order.emplace(grammars_.order(*options.grammar));
    return job->order->is_ready();
  });
  if (ready) return submit(std::move(job), path);
  return {.later = std::make_shared<WaitsForGrammar>(
              std::move(job), [this, path](std::unique_ptr<Job> compiled) {
                return counted(path,
                               reply_or_error([&] { return submit(std::move(compiled), path); }));
              })};
}

void Routes::check_ids(const std::vector<int32_t>& ids, const char* field) const {
  for (const int32_t id : ids) {
    if (id >= session_.config().vocab_size) {
      throw ApiError(400,
                     fmt::format("{}: token {} is not among the model's {} tokens", field, id,
                                 session_.config().vocab_size),
                     field);
    }
  }
}

std::vector<TokenBias> Routes::biases(const std::vector<BiasWish>& wishes) const {
  std::map<int32_t, float> found;
  for (const auto& [token, bias] : wishes) {
    std::vector<int32_t> ids;
    if (const auto* text = std::get_if<std::string>(&token)) {
      ids = tokenizer_.encode(*text);
    } else {
      ids = {std::get<int32_t>(token)};
    }
    check_ids(ids, "logit_bias");
    for (const int32_t id : ids) found[id] = bias;
  }
  if (std::ssize(found) > kMostBiases) {
    throw ApiError(400,
                   fmt::format("logit_bias: {} tokens, of which there are at most {}", found.size(),
                               kMostBiases),
                   "logit_bias");
  }
  std::vector<TokenBias> out;
  for (const auto& [id, bias] : found) out.push_back({id, bias});
  return out;
}

// The request of a sequence; its seed is that of the first choice.
GenerationRequest Routes::generation(std::vector<int32_t> prompt, const AnswerOptions& wanted,
                                     int64_t max_tokens, const std::vector<int32_t>& stop_tokens,
                                     const char* field) const {
  const int64_t new_tokens = max_tokens == 0 ? 0 : 1;
  if (std::ssize(prompt) + new_tokens > session_.capacity()) {
    throw too_long(fmt::format("{} tokens", prompt.size()), field);
  }
  return {.prompt = std::move(prompt),
          .sampler = wanted.sampler,
          .logit_bias = biases(wanted.logit_bias),
          .max_tokens = max_tokens,
          .stop_at_end_of_text = !wanted.ignore_end_of_text,
          .stop_tokens = wanted.ignore_end_of_text ? std::vector<int32_t>() : stop_tokens,
          .stop_strings = wanted.stop,
          .log_probs = wanted.log_probs,
          .share_beginning = !wanted.seeded};
}

std::unique_ptr<Job> Routes::new_job(AnswerOptions wanted, const HttpRequest& request) {
  auto job = std::make_unique<Job>(scheduler_, waker_, memory_, wanted.stream);
  job->client = client_of(request);
  job->body = request.memory;
  if (!wanted.seeded) wanted.sampler.seed = std::random_device()();
  job->options = std::move(wanted);
  ++in_progress_;
  job->in_progress = std::shared_ptr<void>(nullptr, [this](void*) { --in_progress_; });
  return job;
}

void Routes::add_choices(Job& job, const GenerationRequest& request) {
  for (int64_t choice = 0; choice < job.options.choices; ++choice) {
    GenerationRequest one = request;
    one.sampler.seed += static_cast<uint64_t>(choice);
    one.client = job.client;
    if (job.grammar) one.filter = job.grammar->filter(job.end_tokens);
    if (!job.answers.add(std::move(one))) throw overloaded();
    job.usage.emplace_back();
    job.counts_prompt.push_back(choice == 0);
  }
}

// What `parse` makes of the body, whose values as JSON take memory for a moment.
template <typename Parse>
auto Routes::parsed(const std::string& body, const Parse& parse) {
  MemoryBudget::Share values(memory_);
  if (!values.grow(kParsedBytes * std::ssize(body))) throw overloaded();
  return parse(body);
}

// Between whom the scheduler is fair: keys, or connections where there are none.
uint64_t Routes::client_of(const HttpRequest& request) const {
  const std::optional<size_t> key = options_.keys.find(request.authorization, request.api_key);
  return key ? *key : static_cast<uint64_t>(request.connection);
}

HttpReply Routes::complete(const HttpRequest& http_request) {
  CompletionRequest request = parsed(http_request.body, [this](const std::string& body) {
    return parse_completion(body, options_.max_waiting);
  });
  check_model(request.options.model);
  std::unique_ptr<Job> job = new_job(std::move(request.options), http_request);
  const bool log_probs = job->options.log_probs.has_value();
  const int64_t max_tokens = job->options.max_tokens.value_or(kCompletionTokens);
  if (!request.suffix.empty() && !fill_in_) {
    throw ApiError(400,
                   "suffix: this model's tokenizer has no tokens for filling in a text "
                   "(<|fim_prefix|> and the like); leave it out",
                   "suffix");
  }
  std::vector<int32_t> suffix;
  std::vector<int32_t> stops = options_.stop_tokens;
  if (!request.suffix.empty()) {
    suffix = tokenizer_.encode(request.suffix);
    check_ids(suffix, "suffix");
    stops.insert(stops.end(), fill_in_->stops.begin(), fill_in_->stops.end());
  }
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
      if (request.echo) text = tokenizer_.decode(ids);
    }
    if (!request.suffix.empty()) {
      ids = fill_in_prompt(*fill_in_, tokenizer_.bos_token(), ids, suffix);
    }
    if (request.echo) {
      // Each choice has the text as a value and as JSON.
      if (!job->echoes.grow(4 * job->options.choices * std::ssize(text))) {
        throw answer_too_large();
      }
      echoes.push_back({.first_token = ids.empty() ? 0 : ids.front(), .text = std::move(text)});
    }
    GenerationRequest one = generation(std::move(ids), job->options, max_tokens, stops, "prompt");
    if (request.echo && log_probs) one.prompt_log_probs = job->options.log_probs;
    if (max_tokens == 0 && !log_probs) one.prompt_log_probs = 0;
    job->requests.push_back(std::move(one));
  }
  job->format = std::make_unique<CompletionFormat>(
      tokenizer_, log_probs, std::ssize(request.prompts), job->options.choices, std::move(echoes));
  return begin(std::move(job), "/v1/completions", options_.stop_tokens);
}

HttpReply Routes::converse(const HttpRequest& http_request) {
  ChatRequest request = parsed(http_request.body, [this](const std::string& body) {
    return parse_chat(body, options_.max_waiting);
  });
  check_model(request.options.model);
  const std::optional<ToolCallReader> tools = prepare_tools(request);
  std::unique_ptr<Job> job = new_job(std::move(request.options), http_request);
  // The template writes the begin token itself.
  std::vector<int32_t> ids = encode(render(chat_input(request), "messages"), false, "messages");
  job->format = std::make_unique<ChatFormat>(tokenizer_, job->options.log_probs.has_value(),
                                             job->options.choices, tools ? &*tools : nullptr);
  job->requests.push_back(generation(std::move(ids), job->options,
                                     job->options.max_tokens.value_or(session_.capacity()),
                                     options_.chat_stop_tokens, "messages"));
  return begin(std::move(job), "/v1/chat/completions", options_.chat_stop_tokens);
}

HttpReply Routes::respond(const HttpRequest& http_request) {
  ResponseRequest request = parsed(http_request.body, [this](const std::string& body) {
    return parse_response(body, options_.max_waiting);
  });
  check_model(request.options.model);
  const std::optional<ToolCallReader> tools = prepare_tools(request);
  std::unique_ptr<Job> job = new_job(request.options, http_request);
  std::vector<int32_t> ids = encode(render(chat_input(request), "input"), false, "input");
  job->response.emplace(tokenizer_, request, fmt::format("{:08x}{:06x}", started_, ++replied_),
                        options_.model, static_cast<int64_t>(std::time(nullptr)),
                        tools ? &*tools : nullptr);
  job->requests.push_back(generation(std::move(ids), job->options,
                                     job->options.max_tokens.value_or(session_.capacity()),
                                     options_.chat_stop_tokens, "input"));
  return begin(std::move(job), kResponses, options_.chat_stop_tokens);
}

HttpReply Routes::submit(std::unique_ptr<Job> job, const char* path) {
  if (job->order) {
    job->grammar = of_grammar(job->options, [&] { return job->order->get(); });
    job->order.reset();
  }
  for (const GenerationRequest& one : std::exchange(job->requests, {})) add_choices(*job, one);
  job->body.reset();
  if (!job->answers.submit()) throw overloaded();
  if (job->format) {
    job->head = {
        {"id", fmt::format("{}-{:08x}{:06x}", job->format->id_prefix(), started_, ++replied_)},
        {"object", job->format->object(job->options.stream)},
        {"created", static_cast<int64_t>(std::time(nullptr))},
        {"model", options_.model}};
    if (!options_.fingerprint.empty()) job->head["system_fingerprint"] = options_.fingerprint;
  }
  const auto count = [this, path](HttpReply made) { return counted(path, std::move(made)); };
  if (!job->options.stream) return {.later = std::make_shared<WholeAnswer>(std::move(job), count)};
  HttpReply reply{.type = kServerSentEvents, .headers = {{"Cache-Control", "no-cache"}}};
  reply.usage = job->http_usage;
  reply.stream = std::make_shared<StreamedAnswer>(std::move(job));
  return reply;
}

HttpReply Routes::tokenize(const HttpRequest& http_request) {
  const TokenizeRequest request = parsed(http_request.body, parse_tokenize);
  check_model(request.model);
  std::vector<int32_t> ids;
  tokenizer_.encode_sequence(request.prompt
                                 ? *request.prompt
                                 : render({.messages = *request.messages_json,
                                           .tools = request.tools_json,
                                           .variables = request.variables_json,
                                           .add_generation_prompt = request.add_generation_prompt},
                                          "messages"),
                             ids, request.begin_token);
  return json_reply(
      {{"count", ids.size()}, {"max_model_len", session_.capacity()}, {"tokens", ids}});
}

HttpReply Routes::detokenize(const HttpRequest& http_request) {
  const std::vector<int32_t> ids = parsed(http_request.body, parse_detokenize);
  for (const int32_t id : ids) {
    if (id >= tokenizer_.vocab_size()) {
      throw ApiError(400,
                     fmt::format("tokens: {} is not among the tokenizer's {} tokens", id,
                                 tokenizer_.vocab_size()),
                     "tokens");
    }
  }
  return json_reply({{"prompt", tokenizer_.decode(ids)}});
}

}  // namespace twell
