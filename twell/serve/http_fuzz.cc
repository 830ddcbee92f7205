// SPDX-License-Identifier: Apache-2.0
// Any bytes on a connection of the HTTP server: what comes back is HTTP, a body within the limits
// reaches the handler, and the connection ends.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>

#include "twell/base/error.h"
#include "twell/serve/http_server.h"

namespace twell {
namespace {

constexpr int64_t kBodyBytes = 4096;

// A server of the whole process.
class EchoServer {
 public:
  EchoServer()
      : server_(
            {.connections = 8,
             .header_bytes = 4096,
             .body_bytes = kBodyBytes,
             .read = std::chrono::seconds(5),
             .write = std::chrono::seconds(5),
             .keep_alive = std::chrono::seconds(5)},
            [](int status, const std::string& message) {
              return fmt::format("{} {}", status, message);
            },
            [](const HttpRequest&) { return std::nullopt; }) {
    const auto echo = [](const HttpRequest& request) {
      TWELL_CHECK(std::ssize(request.body) <= kBodyBytes, "{} bytes", request.body.size());
      return HttpReply{.body = request.body};
    };
    server_.get("/get", echo);
    server_.get_below("/below/", echo);
    server_.post("/post", echo);
    server_.post("/stream", [](const HttpRequest& request) {
      return HttpReply{.stream = [body = request.body](const HttpReply::Write& write) {
        write(body.empty() ? "empty" : body);
      }};
    });
    port_ = server_.bind("127.0.0.1", 0);
    thread_ = std::thread([this] { server_.run(); });
  }
  ~EchoServer() {
    server_.stop();
    thread_.join();
  }
  int port() const { return port_; }

 private:
  HttpServer server_;
  int port_ = 0;
  std::thread thread_;
};

// Sends the bytes and returns all that comes back.
std::string talk(int port, std::string_view bytes) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int socket = -1;
  for (int fault = EINTR; fault != 0;) {  // libFuzzer's timer interrupts system calls
    socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool connected =
        ::connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    fault = connected ? 0 : errno;
    TWELL_CHECK(fault == 0 || fault == EINTR, "cannot connect: {}", std::strerror(fault));
    if (fault != 0) ::close(socket);
  }
  const timeval limit{.tv_sec = 30, .tv_usec = 0};
  ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  ::shutdown(socket, SHUT_WR);
  std::string reply;
  char piece[4096];
  for (;;) {
    const ssize_t count = ::recv(socket, piece, sizeof(piece), 0);
    if (count < 0 && errno == EINTR) continue;
    TWELL_CHECK(count >= 0 || errno != EAGAIN, "the connection does not end");
    if (count <= 0) break;
    reply.append(piece, static_cast<size_t>(count));
  }
  ::close(socket);
  return reply;
}

}  // namespace
}  // namespace twell

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static twell::EchoServer server;
  const std::string reply = twell::talk(server.port(), {reinterpret_cast<const char*>(data), size});
  TWELL_CHECK(reply.empty() || reply.starts_with("HTTP/1."), "no HTTP: {}", reply);
  return 0;
}
