// SPDX-License-Identifier: Apache-2.0
// Faults inside the server and of its socket. What clients see of it: tests/serve_client_test.py;
// any bytes on a connection: http_fuzz.cc.
#include "twell/serve/http_server.h"

#include <gtest/gtest.h>
#include <httplib.h>

#include <stdexcept>
#include <thread>

#include "twell/base/error.h"

namespace twell {
namespace {

class HttpServerTest : public testing::Test {
 protected:
  HttpServerTest() {
    server_.get("/good", [](const HttpRequest&) { return HttpReply{.body = "good"}; });
    server_.get("/throws", [](const HttpRequest&) -> HttpReply { throw std::bad_alloc(); });
    server_.get("/breaks", [](const HttpRequest&) {
      return HttpReply{.stream = [](const HttpReply::Write& write) {
        write("begin");
        throw std::bad_alloc();
      }};
    });
    port_ = server_.bind("127.0.0.1", 0);
  }

  HttpServer server_{{.connections = 4},
                     [](int status, const std::string&) { return std::to_string(status); },
                     [](const HttpRequest& request) -> std::optional<HttpReply> {
                       if (request.authorization == "throws") throw std::bad_alloc();
                       return std::nullopt;
                     }};
  int port_ = 0;
};

// The socket that listens on the port.
int listening_socket(int port) {
  for (int file = 3; file < 1024; ++file) {
    int listens = 0;
    socklen_t size = sizeof(listens);
    if (::getsockopt(file, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0)
      continue;
    sockaddr_in address{};
    size = sizeof(address);
    ::getsockname(file, reinterpret_cast<sockaddr*>(&address), &size);
    if (ntohs(address.sin_port) == port) return file;
  }
  return -1;
}

TEST_F(HttpServerTest, AnExceptionEndsOneRequestAlone) {
  std::thread thread([this] { server_.run(); });
  for (int i = 0; i < 3; ++i) {
    httplib::Client client("127.0.0.1", port_);
    const auto thrown = client.Get("/throws");
    ASSERT_TRUE(thrown);
    EXPECT_EQ(thrown->status, 500);
    EXPECT_FALSE(client.Get("/breaks")) << "a body without its end is no whole reply";
    EXPECT_FALSE(client.Get("/good", {{"Authorization", "throws"}}));
    const auto good = client.Get("/good");
    ASSERT_TRUE(good);
    EXPECT_EQ(good->body, "good");
  }
  server_.stop();
  thread.join();
}

TEST_F(HttpServerTest, SaysWhenItCannotAcceptConnections) {
  std::thread breaks([this] {
    httplib::Client client("127.0.0.1", port_);
    EXPECT_TRUE(client.Get("/good"));
    ::shutdown(listening_socket(port_), SHUT_RDWR);
  });
  EXPECT_THROW(server_.run(), InputError);
  breaks.join();
  server_.stop();
}

TEST_F(HttpServerTest, StopsBeforeItRuns) {
  server_.stop();
  server_.run();
}

}  // namespace
}  // namespace twell
