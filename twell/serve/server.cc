// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/server.h"

#include <exception>
#include <thread>
#include <utility>

#include "twell/base/error.h"
#include "twell/infer/scheduler.h"
#include "twell/serve/openai.h"
#include "twell/serve/request_log.h"
#include "twell/serve/routes.h"

namespace twell {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kPoll{20};  // how often run() looks at its flags
// Time for cancelled requests to report their end to clients that read slowly.
constexpr std::chrono::seconds kGoodbye{5};

}  // namespace

struct Server::Impl {
  Impl(Session& session, const Tokenizer& tokenizer, const ChatTemplate* chat,
       ServerOptions options_in)
      : options(std::move(options_in)),
        memory(options.request_bytes),
        scheduler(session, tokenizer,
                  {.max_waiting = options.max_waiting,
                   .prefill_tokens = options.prefill_tokens,
                   .speculate = options.speculate}),
        routes(session, tokenizer, chat, options, scheduler, waker, memory),
        http(
            options.http, memory,
            [](int status, const std::string& message) {
              return to_text(error_json(ApiError(status, message)));
            },
            [this](const HttpRequest& request) { return routes.admit(request); }) {
    routes.add_to(http);
    http.allow_origins(AllowedOrigins(options.allowed_origins));
    if (options.log_request) {
      http.log_to([this](const HttpRecord& record) { options.log_request(request_line(record)); });
    }
  }

  void wait_until_idle(std::chrono::seconds at_most) const {
    const Clock::time_point deadline = Clock::now() + at_most;
    while (routes.in_progress() > 0 && Clock::now() < deadline) std::this_thread::sleep_for(kPoll);
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
    routes.stop();
    http.hurry();
    if (!failed) wait_until_idle(options.drain);
    scheduler.cancel_all();
    scheduler.drain();
    wait_until_idle(kGoodbye);
    http.stop();
    connections.join();
    engine.join();
    if (failure) std::rethrow_exception(failure);
    if (http_failure) std::rethrow_exception(http_failure);
  }

  const ServerOptions options;
  MemoryBudget memory;
  Waker waker;
  Scheduler scheduler;
  Routes routes;
  HttpServer http;
  std::atomic<bool> failed{false};  // the model
};

Server::Server(Session& session, const Tokenizer& tokenizer, const ChatTemplate* chat,
               ServerOptions options)
    : impl_(std::make_unique<Impl>(session, tokenizer, chat, std::move(options))) {}

Server::~Server() = default;

int Server::bind(const std::string& host, int port) {
  const int bound = impl_->http.bind(host, port);
  impl_->routes.allow_hosts(AllowedHosts(host, impl_->options.allowed_hosts));
  return bound;
}

void Server::run(const std::atomic<bool>& stop) { impl_->run(stop); }

}  // namespace twell
