// SPDX-License-Identifier: Apache-2.0
// What the server answers at each path: requests of the API become sequences of the scheduler, and
// their events become answers.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "twell/grammar/grammar.h"
#include "twell/serve/allowed_hosts.h"
#include "twell/serve/answer_formats.h"
#include "twell/serve/fill_in.h"
#include "twell/serve/http_server.h"
#include "twell/serve/openai.h"
#include "twell/serve/server.h"

namespace twell {

struct Job;

class Routes {
 public:
  // What is passed in must outlive this object.
  Routes(Session& session, const Tokenizer& tokenizer, const ChatTemplate* chat,
         const ServerOptions& options, Scheduler& scheduler, Waker& waker, MemoryBudget& memory);

  void add_to(HttpServer& http);
  // The refusal of a request whose body has not been read.
  std::optional<HttpReply> admit(const HttpRequest& request);

  // The names under which the server is reached. Called before it serves.
  void allow_hosts(AllowedHosts hosts) { hosts_ = std::move(hosts); }
  // From now on requests are refused.
  void stop() { stopping_ = true; }
  // Requests whose sequences run, wait, or have not been answered.
  int64_t in_progress() const { return in_progress_; }

 private:
  HttpReply counted(const std::string& path, HttpReply reply);
  ApiError no_such_model(const std::string& name) const;
  void check_model(const std::string& name) const;
  nlohmann::ordered_json model_json() const;
  HttpReply health() const;
  HttpReply metrics();
  HttpReply activity() const;

  std::vector<int32_t> encode(const std::string& text, bool begin_token, const char* field) const;
  ApiError too_long(const std::string& size, const char* field) const;
  std::string render(const ChatInput& input, const char* field) const;
  // What the answers to a chat are drawn by, and how calls in them are read.
  std::optional<ToolCallReader> prepare_tools(ChatRequest& request) const;
  void check_ids(const std::vector<int32_t>& ids, const char* field) const;
  std::vector<TokenBias> biases(const std::vector<BiasWish>& wishes) const;
  GenerationRequest generation(std::vector<int32_t> prompt, const AnswerOptions& wanted,
                               int64_t max_tokens, const std::vector<int32_t>& stop_tokens,
                               const char* field) const;
  std::unique_ptr<Job> new_job(AnswerOptions wanted, const HttpRequest& request);
  // Hands the job's requests over, at once or when the grammar of their answers is compiled.
  HttpReply begin(std::unique_ptr<Job> job, const char* path,
                  const std::vector<int32_t>& stop_tokens);
  HttpReply submit(std::unique_ptr<Job> job, const char* path);
  void add_choices(Job& job, const GenerationRequest& request);
  template <typename Parse>
  auto parsed(const std::string& body, const Parse& parse);
  uint64_t client_of(const HttpRequest& request) const;

  HttpReply complete(const HttpRequest& http_request);
  HttpReply converse(const HttpRequest& http_request);
  HttpReply respond(const HttpRequest& http_request);
  HttpReply tokenize(const HttpRequest& http_request);
  HttpReply detokenize(const HttpRequest& http_request);

  Session& session_;
  const Tokenizer& tokenizer_;
  const ChatTemplate* chat_;
  const ServerOptions& options_;
  Scheduler& scheduler_;
  GrammarCompiler grammars_;
  Waker& waker_;
  MemoryBudget& memory_;
  const int64_t started_;
  int64_t longest_token_ = 1;  // bytes
  double first_joules_ = 0.0;
  AllowedHosts hosts_;
  std::optional<FillInTokens> fill_in_;
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> in_progress_{0}, replied_{0};
  std::mutex mutex_;  // guards replies_
  std::map<std::pair<std::string, int>, int64_t> replies_;
};

}  // namespace twell
