// SPDX-License-Identifier: Apache-2.0
// Serves one model with OpenAI's API over HTTP. docs/serving.md describes endpoints and fields.
//
// A few threads read and write connections, others parse, render chat templates and tokenize
// (http_server.h); one engine thread runs the model (infer/scheduler.h).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "twell/chat_template/chat_template.h"
#include "twell/infer/session.h"
#include "twell/serve/api_keys.h"
#include "twell/serve/http_server.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {

struct ServerOptions {
  std::string model;                      // the name that clients use
  std::vector<int32_t> stop_tokens;       // end a completion
  std::vector<int32_t> chat_stop_tokens;  // end a chat completion
  ApiKeys keys;
  // Names besides this machine's and the bound address under which clients without keys reach the
  // server; "*": any (allowed_hosts.h).
  std::vector<std::string> allowed_hosts;
  // Sites whose pages may use the server, "*": any (allowed_origins.h).
  std::vector<std::string> allowed_origins;
  std::string fingerprint;  // "system_fingerprint" of answers; empty: they have none
  // Takes a line of JSON for each request (request_log.h), on several threads. Empty: no log.
  std::function<void(const std::string& line)> log_request;
  HttpLimits http;
  // Sequences without a slot; a request with more than fit is answered with 503.
  int64_t max_waiting = 1024;
  // For the bodies, prompts and answers of all requests in progress; what does not fit is answered
  // with 503.
  int64_t request_bytes = int64_t{4} << 30;
  int64_t prefill_tokens = 0;      // SchedulerOptions::prefill_tokens
  int64_t speculate = 0;           // SchedulerOptions::speculate
  std::chrono::seconds drain{30};  // for running requests once the server is told to stop
  std::string no_chat;             // why there is no chat template, for clients that send messages
  // Joules that the device has used so far; empty where unknown.
  std::function<double()> joules;
};

class Server {
 public:
  // chat: null when the model has no chat template. What is passed in must outlive this object, and
  // only the server uses the session. InputError on impossible options.
  Server(Session& session, const Tokenizer& tokenizer, const ChatTemplate* chat,
         ServerOptions options);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Does what HttpServer::bind() does. InputError also for an allowed host that is no host.
  int bind(const std::string& host, int port);
  // Serves until `stop` is true. Then it refuses new requests, lets those in progress finish within
  // options.drain, cancels the rest, and returns. Throws what the model throws.
  void run(const std::atomic<bool>& stop);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace twell
