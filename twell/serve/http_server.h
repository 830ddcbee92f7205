// SPDX-License-Identifier: Apache-2.0
// An HTTP/1.1 server for untrusted clients, a thread per connection. It parses with cpp-httplib and
// reads and writes the sockets itself, because the library bounds neither the size of all headers
// nor the time of a whole request.
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
  std::string path;  // decoded, without the query
  std::string authorization;
  std::string body;
  // Whether the client is still connected. Does not block.
  std::function<bool()> connected;
};

struct HttpReply {
  // Sends a piece; false when the client has gone or does not read.
  using Write = std::function<bool(std::string_view piece)>;

  int status = 200;
  std::string type = "application/json";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers;
  // When set, called after the headers are sent, and writes the body in pieces. An exception closes
  // the connection in the middle of the body.
  std::function<void(const Write& write)> stream;
};

class HttpServer {
 public:
  // May be called on many threads at once. An exception becomes a reply with status 500.
  using Handler = std::function<HttpReply(const HttpRequest&)>;
  // The JSON body of a failure that the server itself reports: 400, 404, 405, 413, 415, 500, 503.
  using ErrorBody = std::function<std::string(int status, const std::string& message)>;
  // Called before a request's body is read, which it leaves empty; a reply refuses the request.
  using Admit = std::function<std::optional<HttpReply>(const HttpRequest&)>;

  HttpServer(const HttpLimits& limits, ErrorBody error_body, Admit admit);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // Routes are fixed before run(). POST bodies must have the content type application/json.
  void get(const std::string& path, Handler handler);
  void get_below(const std::string& prefix, Handler handler);
  void post(const std::string& path, Handler handler);

  // Listens; port 0 picks a free one. Returns the port. InputError when the address is not usable.
  int bind(const std::string& host, int port);
  // Serves until stop(), then waits until the handlers in progress have returned. InputError when
  // there are fewer threads than connections, or when no more connections can be accepted.
  void run();
  // Thread-safe. Connections without a request in progress are closed.
  void stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace twell
