// SPDX-License-Identifier: Apache-2.0
// Faults inside the server and of its socket, and how it ends. What clients see of it:
// tests/serve_client_test.py, serve_life_test.py and serve_http_test.py; any bytes on a connection:
// http_fuzz.cc.
#include "twell/serve/http_server.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "twell/base/error.h"
#include "twell/serve/http_encoding.h"
#include "twell/serve/test_client.h"

namespace twell {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

std::string get(const std::string& path, const std::string& fields = "",
                const std::string& version = "1.1") {
  return "GET " + path + " HTTP/" + version + "\r\nHost: h\r\n" + fields + "\r\n";
}
std::string post(const std::string& path, const std::string& body,
                 const std::string& fields = "Content-Type: application/json\r\n") {
  return "POST " + path + " HTTP/1.1\r\nHost: h\r\n" + fields +
         fmt::format("Content-Length: {}\r\n\r\n{}", body.size(), body);
}
std::string body_of(const std::string& reply) {
  const size_t end = reply.find("\r\n\r\n");
  return end == reply.npos ? "no reply" : reply.substr(end + 4);
}
int status_of(const std::string& reply) {
  return reply.size() < 12 ? 0 : std::stoi(reply.substr(9, 3));
}
size_t replies_in(const std::string& bytes) {
  size_t count = 0;
  for (size_t at = 0; (at = bytes.find("HTTP/1.1 ", at)) != bytes.npos; ++at) ++count;
  return count;
}

struct Throwing final : HttpStream {
  void notify(std::function<void()> ready) override { ready(); }
  State next(std::string& piece) override {
    if (begun) throw std::bad_alloc();
    begun = true;
    piece = "begin";
    return State::kWaits;
  }
  bool begun = false;
};

// Three pieces, one at a time, then the end.
struct Counting final : HttpStream {
  void notify(std::function<void()> ready_in) override {
    ready = std::move(ready_in);
    ready();
  }
  State next(std::string& piece) override {
    if (count == 3) return State::kEnds;
    piece = fmt::format("piece {};", ++count);
    ready();
    return State::kWaits;
  }
  std::function<void()> ready;
  int count = 0;
};

// Never known; counts those that live.
struct Endless final : HttpStream {
  explicit Endless(std::atomic<int>& live_in, bool floods_in) : live(live_in), floods(floods_in) {
    ++live;
  }
  ~Endless() override { --live; }
  void notify(std::function<void()> ready) override { ready(); }
  State next(std::string& piece) override {
    if (floods) piece.assign(1 << 20, 'x');
    return State::kWaits;
  }
  std::atomic<int>& live;
  const bool floods;
};
struct Never final : HttpLater {
  explicit Never(std::atomic<int>& live_in) : live(live_in) { ++live; }
  ~Never() override { --live; }
  void notify(std::function<void()>) override {}
  std::optional<HttpReply> reply() override { return std::nullopt; }
  std::atomic<int>& live;
};

// Becomes another reply.
struct Becomes final : HttpLater {
  explicit Becomes(HttpReply next_in) : next(std::move(next_in)) {}
  void notify(std::function<void()> ready) override { ready(); }
  std::optional<HttpReply> reply() override { return next; }
  HttpReply next;
};

class HttpServerTest : public testing::Test {
 protected:
  explicit HttpServerTest(const HttpLimits& limits = {.connections = 4, .write = seconds(60)})
      : server_(
            limits, memory_,
            [](int status, const std::string& message) {
              return fmt::format("{} {}", status, message);
            },
            [](const HttpRequest& request) -> std::optional<HttpReply> {
              if (request.authorization == "throws") throw std::bad_alloc();
              return std::nullopt;
            }) {
    server_.get("/good", [](const HttpRequest&) { return HttpReply{.body = "good"}; });
    server_.get("/long",
                [](const HttpRequest&) { return HttpReply{.body = std::string(100000, 'l')}; });
    server_.get("/throws", [](const HttpRequest&) -> HttpReply { throw std::bad_alloc(); });
    server_.get("/breaks", [](const HttpRequest&) {
      return HttpReply{.stream = std::make_shared<Throwing>()};
    });
    server_.get("/counts", [](const HttpRequest&) {
      return HttpReply{.stream = std::make_shared<Counting>()};
    });
    server_.get("/waits", [this](const HttpRequest&) {
      return HttpReply{.stream = std::make_shared<Endless>(live_, false)};
    });
    server_.get("/floods", [this](const HttpRequest&) {
      return HttpReply{.stream = std::make_shared<Endless>(live_, true)};
    });
    server_.get("/never", [this](const HttpRequest&) {
      return HttpReply{.later = std::make_shared<Never>(live_)};
    });
    server_.get("/chain", [](const HttpRequest&) {
      HttpReply reply{.stream = std::make_shared<Counting>()};
      for (int i = 0; i < 2; ++i) reply = {.later = std::make_shared<Becomes>(std::move(reply))};
      return reply;
    });
    server_.post("/echo", [](const HttpRequest& request) {
      if (request.body == "throw") throw std::bad_alloc();
      return HttpReply{.body = request.body};
    });
    port_ = server_.bind("127.0.0.1", 0);
  }
  ~HttpServerTest() override { stop(); }
  void run() {
    thread_ = std::thread([this] { server_.run(); });
  }
  void stop() {
    server_.stop();
    if (thread_.joinable()) thread_.join();
  }
  bool wait_for_live(int count) const {
    const Clock::time_point deadline = Clock::now() + seconds(10);
    while (live_ != count && Clock::now() < deadline) std::this_thread::sleep_for(milliseconds(2));
    return live_ == count;
  }

  std::atomic<int> live_{0};
  MemoryBudget memory_{1 << 24};
  HttpServer server_;
  int port_ = 0;
  std::thread thread_;
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
  run();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(status_of(talk(port_, get("/throws"))), 500);
    EXPECT_EQ(status_of(talk(port_, post("/echo", "throw"))), 500);
    EXPECT_EQ(talk(port_, get("/good", "Authorization: throws\r\n")), "");
    EXPECT_EQ(body_of(talk(port_, get("/good"))), "good");
    const TestClient client(port_);
    client.send(get("/breaks"));
    EXPECT_FALSE(client.receive_all().ends_with("0\r\n\r\n")) << "a body without its end";
  }
  EXPECT_EQ(memory_.used(), 0);
}

TEST_F(HttpServerTest, SaysWhenItCannotAcceptConnections) {
  std::thread breaks([this] {
    EXPECT_EQ(body_of(talk(port_, get("/good"))), "good");
    ::shutdown(listening_socket(port_), SHUT_RDWR);
  });
  EXPECT_THROW(server_.run(), InputError);
  breaks.join();
}

TEST_F(HttpServerTest, StopsBeforeItRuns) {
  server_.stop();
  server_.run();
}

TEST_F(HttpServerTest, UnusableAddresses) {
  HttpServer other({}, memory_, nullptr, nullptr);
  EXPECT_THROW(other.bind("", 0), InputError);
  EXPECT_THROW(other.bind("192.0.2.1", 0), InputError);
  EXPECT_THROW(other.bind("no such name", 0), InputError);
  EXPECT_THROW(other.bind("127.0.0.1", port_), InputError);
  HttpServer many({.connections = 1 << 30}, memory_, nullptr, nullptr);
  EXPECT_THROW(many.bind("127.0.0.1", 0), InputError);
}

TEST_F(HttpServerTest, RequestsInOnePiece) {
  run();
  const TestClient client(port_);
  client.send(get("/good") + post("/echo", "one") + post("/echo", "two") + get("/counts") +
              get("/good", "Connection: close\r\n"));
  const std::string all = client.receive_all();
  EXPECT_EQ(replies_in(all), 5u);
  EXPECT_NE(all.find("one"), all.npos);
  EXPECT_LT(all.find("one"), all.find("two"));
  EXPECT_NE(all.find("8\r\npiece 1;\r\n8\r\npiece 2;\r\n8\r\npiece 3;\r\n0\r\n\r\n"), all.npos);
  EXPECT_TRUE(all.ends_with("good"));
}

TEST_F(HttpServerTest, NothingIsReadBehindAFault) {
  run();
  const std::string smuggled = get("/good");
  for (const std::string& bytes :
       {"NOT HTTP\r\n\r\n" + smuggled, get("/good", "Content-Length: 45abc\r\n") + smuggled,
        get("/nothing", "Content-Length: 60\r\n") + smuggled, "\r\n" + smuggled,
        post("/echo", smuggled, "Content-Type: text/plain\r\n") + smuggled}) {
    const std::string all = talk(port_, bytes);
    EXPECT_EQ(replies_in(all), 1u) << all;
    EXPECT_GE(status_of(all), 400) << all;
    EXPECT_NE(all.find("Connection: close"), all.npos);
  }
  // The body of a GET is a body.
  const std::string all =
      talk(port_, get("/good", fmt::format("Content-Length: {}\r\n", smuggled.size())) + smuggled);
  EXPECT_EQ(replies_in(all), 1u);
}

TEST_F(HttpServerTest, AFaultBehindAHeadHasItsBody) {
  run();
  const std::string all = talk(port_, "HEAD /good HTTP/1.1\r\nHost: h\r\n\r\nNOT HTTP\r\n\r\n");
  EXPECT_EQ(replies_in(all), 2u);
  EXPECT_NE(all.find("400 the request is not HTTP"), all.npos);
}

TEST_F(HttpServerTest, OldClientsGetNoChunks) {
  run();
  const TestClient client(port_);
  client.send(get("/counts", "Connection: keep-alive\r\n", "1.0"));
  const std::string all = client.receive_all();
  EXPECT_EQ(all.find("chunked"), all.npos);
  EXPECT_NE(all.find("Connection: close"), all.npos);
  EXPECT_EQ(body_of(all), "piece 1;piece 2;piece 3;");
}

TEST_F(HttpServerTest, Encodings) {
  run();
  const std::string json = "Content-Type: Application/Json; charset=UTF-8\r\n";
  EXPECT_EQ(
      body_of(talk(port_, post("/echo", gzip("packed"), json + "Content-Encoding: GZip\r\n"))),
      "packed");
  for (const char* unknown : {"br", "zstd", "gzip, gzip", "nonsense"}) {
    EXPECT_EQ(
        status_of(talk(port_, post("/echo", "x", json + "Content-Encoding: " + unknown + "\r\n"))),
        415);
  }
  EXPECT_EQ(status_of(talk(port_, post("/echo", "x", json + "Content-Encoding: gzip\r\n"))), 400);
  const std::string small = talk(port_, get("/good", "Accept-Encoding: gzip\r\n"));
  EXPECT_EQ(body_of(small), "good");
  EXPECT_EQ(body_of(talk(port_, get("/long"))).size(), 100000u);
  const std::string packed = talk(port_, get("/long", "Accept-Encoding: br, gzip\r\n"));
  EXPECT_NE(packed.find("Content-Encoding: gzip"), packed.npos);
  std::string body = body_of(packed);
  MemoryBudget::Share share(memory_);
  EXPECT_EQ(decode_body("gzip", 1 << 20, share, body), Decoded::kGood);
  EXPECT_EQ(body, std::string(100000, 'l'));
}

TEST_F(HttpServerTest, AReplyThatComesLaterMayBecomeAStream) {
  run();
  const TestClient client(port_);
  client.send(get("/chain") + get("/good"));
  const std::string all = client.receive_until("good");
  EXPECT_EQ(replies_in(all), 2u);
  EXPECT_NE(all.find("piece 3;"), std::string::npos) << all;
}

TEST_F(HttpServerTest, Expectations) {
  run();
  const std::string fields = "Content-Type: application/json\r\nExpect: 100-Continue\r\n";
  const std::string whole = post("/echo", "body", fields);
  const TestClient client(port_);
  client.send(whole.substr(0, whole.size() - 4));
  EXPECT_EQ(client.receive(), "HTTP/1.1 100 Continue\r\n\r\n");
  client.send("body");
  EXPECT_TRUE(client.receive_until("body").starts_with("HTTP/1.1 200"));
  EXPECT_EQ(status_of(talk(port_, get("/good", "Expect: miracles\r\n"))), 417);
  EXPECT_EQ(status_of(talk(port_, post("/nothing", "", fields))), 404);
}

// Also when bytes of a further request are already there.
TEST_F(HttpServerTest, HearsOfClientsThatGo) {
  run();
  for (const char* path : {"/waits", "/never", "/floods"}) {
    for (const size_t ahead : {0, 100, 100000}) {
      const TestClient client(port_);
      client.send(get(path) + "GET /good?" + std::string(ahead, 'a'));
      EXPECT_TRUE(wait_for_live(1)) << path;
      client.end();
      EXPECT_TRUE(wait_for_live(0)) << path << ", " << ahead << " bytes behind";
    }
  }
}

TEST_F(HttpServerTest, ManyRequestsMoreThanBuffersHold) {
  run();
  std::string all;
  for (int i = 0; i < 2000; ++i) all += get("/good") + post("/echo", std::to_string(i));
  const TestClient client(port_);
  std::thread sends([&] { client.send(all); });
  const std::string replies = client.receive_until("\r\n\r\n1999");
  sends.join();
  EXPECT_EQ(replies_in(replies), 4000u);
}

TEST_F(HttpServerTest, ConnectionsBeyondTheLimit) {
  run();
  {
    std::vector<std::unique_ptr<TestClient>> clients;
    for (int i = 0; i < 4; ++i) {
      clients.push_back(std::make_unique<TestClient>(port_));
      clients.back()->send(get("/good"));
      EXPECT_TRUE(clients.back()->receive_until("good").starts_with("HTTP/1.1 200"));
    }
    const TestClient further(port_);
    EXPECT_EQ(status_of(further.receive_all()), 503);
  }
  const Clock::time_point deadline = Clock::now() + seconds(10);
  while (status_of(talk(port_, get("/good"))) != 200) ASSERT_LT(Clock::now(), deadline);
}

// Neither idle connections, nor half-sent requests, nor clients that do not read, nor replies that
// are not known hold it up.
TEST_F(HttpServerTest, StopsAtOnce) {
  run();
  const TestClient idle(port_), half(port_), slow(port_), waiting(port_);
  idle.send(get("/good"));
  EXPECT_TRUE(idle.receive_until("good").ends_with("good"));
  half.send(
      "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 9");
  slow.send(get("/floods"));
  waiting.send(get("/never"));
  EXPECT_TRUE(wait_for_live(2));
  const Clock::time_point start = Clock::now();
  stop();
  EXPECT_LT(Clock::now() - start, seconds(5));
  EXPECT_EQ(live_, 0);
  EXPECT_EQ(waiting.receive_all(), "");
}

TEST_F(HttpServerTest, HurriesClientsThatDoNotRead) {
  run();
  const TestClient slow(port_);
  slow.send(get("/floods"));
  EXPECT_TRUE(wait_for_live(1));
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(live_, 1);
  server_.hurry();
  EXPECT_TRUE(wait_for_live(0));
}

struct SlowClients : HttpServerTest {
  SlowClients()
      : HttpServerTest({.read = seconds(1), .write = seconds(1), .keep_alive = seconds(1)}) {}
};

TEST_F(SlowClients, AreClosed) {
  run();
  const TestClient idle(port_), half(port_), reads_nothing(port_);
  half.send("GET /good HTTP/1.1\r\n");
  reads_nothing.send(get("/floods"));
  EXPECT_TRUE(wait_for_live(1));
  EXPECT_EQ(idle.receive_all(), "");
  EXPECT_EQ(status_of(half.receive_all()), 400);
  EXPECT_TRUE(wait_for_live(0));
  // The limit is of the whole request, whatever arrives meanwhile.
  const TestClient dribbles(port_);
  const Clock::time_point start = Clock::now();
  std::thread sends([&] {
    for (int i = 0; i < 30; ++i) {
      dribbles.send(i == 0 ? "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
                             "Content-Length: 99\r\n\r\n"
                           : "a");
      std::this_thread::sleep_for(milliseconds(100));
    }
  });
  EXPECT_EQ(status_of(dribbles.receive_all()), 400);
  EXPECT_LT(Clock::now() - start, milliseconds(2500));
  sends.join();
}

}  // namespace
}  // namespace twell
