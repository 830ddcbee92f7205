// SPDX-License-Identifier: Apache-2.0
// An HTTP/1.1 server for untrusted clients on Boost.Asio: a few threads do all reading and writing,
// so that a connection that waits or streams costs memory and no thread, and a few others run the
// handlers of POST requests, which may take long. http_reader.h says what a request is.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "twell/serve/allowed_origins.h"
#include "twell/serve/memory_budget.h"

namespace twell {

struct HttpLimits {
  int64_t connections = 512;            // more are answered with 503 and closed
  int64_t header_bytes = 32 << 10;      // request line and headers
  int64_t body_bytes = 4 << 20;         // after decompression
  std::chrono::seconds read{30};        // from the first byte of a request to its last
  std::chrono::seconds write{20};       // until the client takes the next 64 KiB
  std::chrono::seconds keep_alive{60};  // until the next request of a connection
};

struct HttpRequest {
  std::string method;
  std::string path;                    // decoded, without the query
  std::optional<std::string> host;     // as the client sent it
  std::string authorization, api_key;  // of Authorization and X-Api-Key
  std::string body;                    // decompressed
  int64_t connection = 0;              // 1, 2, ...: the same for the requests of one connection
  // What the body occupies of the server's memory budget, as long as somebody holds it.
  std::shared_ptr<MemoryBudget::Share> memory;
};

// What a request took of the model, for the log.
struct HttpUsage {
  std::optional<int64_t> prompt_tokens, completion_tokens;
};

// A request that has ended, answered or not.
struct HttpRecord {
  std::chrono::system_clock::time_point time;  // of its head
  std::string method, path;
  int status = 0;        // that was sent; 499 where the client has gone before the reply's end
  double seconds = 0.0;  // from its head to the reply's last byte
  HttpUsage usage;
};

struct HttpReply;

// What a reply waits for. Its destruction tells that nobody waits any more, because the reply is
// complete or the client has gone.
class HttpPending {
 public:
  virtual ~HttpPending() = default;
  // Called once, before anything else. From now on until this object's end, `ready` is called on
  // any thread when there may be something new. It returns at once.
  virtual void notify(std::function<void()> ready) = 0;
};

// A body whose pieces become known one after the other.
class HttpStream : public HttpPending {
 public:
  enum class State { kWaits, kEnds };
  // Adds what is new to the piece. Called by one thread at a time, when the client has taken the
  // last piece. An exception closes the connection in the middle of the body.
  virtual State next(std::string& piece) = 0;
};

// A reply that becomes known as a whole. What it becomes may be a stream, or come later again.
class HttpLater : public HttpPending {
 public:
  // Nothing while it is not known. Called by one thread at a time.
  virtual std::optional<HttpReply> reply() = 0;
};

struct HttpReply {
  int status = 200;
  std::string type = "application/json";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers;
  std::shared_ptr<HttpStream> stream;  // where set, makes the body
  std::shared_ptr<HttpLater> later;    // where set, makes the reply; nothing else counts
  std::shared_ptr<HttpUsage> usage;    // as it is when the reply ends; null: of no interest
};

class HttpServer {
 public:
  // May be called on many threads at once. An exception becomes a reply with status 500.
  using Handler = std::function<HttpReply(const HttpRequest&)>;
  // The JSON body of a failure that the server itself reports: 400, 404, 405, 413, 415, 417, 499,
  // 500, 503.
  using ErrorBody = std::function<std::string(int status, const std::string& message)>;
  // Called before a request's body is read, which it leaves empty; a reply refuses the request.
  using Admit = std::function<std::optional<HttpReply>(const HttpRequest&)>;

  // The budget holds the bodies of requests; it must outlive this object.
  HttpServer(const HttpLimits& limits, MemoryBudget& budget, ErrorBody error_body, Admit admit);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // Routes are fixed before run(). Handlers of GET requests return at once. POST bodies must have
  // the content type application/json.
  void get(const std::string& path, Handler handler);
  void get_below(const std::string& prefix, Handler handler);
  void post(const std::string& path, Handler handler);

  // Pages of these sites may use the server. Called before run().
  void allow_origins(AllowedOrigins origins);
  // Called for each request whose head could be read, on the threads of connections: it returns
  // soon and does not throw. Called before run().
  void log_to(std::function<void(const HttpRecord& record)> log);

  // Listens; port 0 picks a free one. Returns the port. InputError when the address is empty or not
  // usable, or when the process may not open so many connections.
  int bind(const std::string& host, int port);
  // Serves until stop(), then until the handlers in progress have returned and their replies are
  // sent. InputError when the threads cannot be started or no more connections can be accepted.
  void run();
  // Thread-safe. From now on clients must read what they are sent within a second or two.
  void hurry();
  // Thread-safe. Connections without a request in progress are closed, half-sent requests and
  // pending replies are dropped.
  void stop();

  struct Impl;  // http_server.cc

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace twell
