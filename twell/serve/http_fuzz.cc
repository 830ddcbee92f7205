// SPDX-License-Identifier: Apache-2.0
// Any bytes on a connection of the HTTP server: what comes back is HTTP, a body within the limits
// reaches the handler, and the connection ends. The reader alone sees the same requests however the
// bytes are cut.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "twell/base/error.h"
#include "twell/serve/http_reader.h"
#include "twell/serve/http_server.h"
#include "twell/serve/test_client.h"

namespace twell {
namespace {

constexpr int64_t kHeaderBytes = 4096, kBodyBytes = 4096;

// A server of the whole process.
class EchoServer {
 public:
  EchoServer()
      : server_(
            {.connections = 8,
             .header_bytes = kHeaderBytes,
             .body_bytes = kBodyBytes,
             .read = std::chrono::seconds(5),
             .write = std::chrono::seconds(5),
             .keep_alive = std::chrono::seconds(5)},
            memory_,
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
      return HttpReply{.stream = std::make_shared<Echo>(request.body)};
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
  class Echo final : public HttpStream {
   public:
    explicit Echo(std::string body) : body_(std::move(body)) {}
    void notify(std::function<void()> ready) override { ready(); }
    State next(std::string& piece) override {
      piece = body_.empty() ? "empty" : body_;
      return State::kEnds;
    }

   private:
    std::string body_;
  };

  MemoryBudget memory_{int64_t{1} << 30};
  HttpServer server_;
  int port_ = 0;
  std::thread thread_;
};

// The requests that a reader finds in the bytes, given to it in pieces of at most so many, and how
// it ends.
std::vector<std::string> requests_of(std::string_view bytes, size_t most) {
  MemoryBudget memory(int64_t{1} << 30);
  HttpReader reader({kHeaderBytes, kBodyBytes}, memory);
  std::vector<std::string> found;
  while (!bytes.empty()) {
    std::string_view piece = bytes.substr(0, most);
    bytes.remove_prefix(piece.size());
    while (true) {
      const HttpReader::Step step = reader.read(piece);
      if (step == HttpReader::Step::kMore) break;
      if (step == HttpReader::Step::kFault) {
        found.push_back(fmt::format("fault {}", reader.fault().status));
        return found;
      }
      if (step == HttpReader::Step::kHead) continue;
      MemoryBudget::Share share(memory);
      found.push_back(fmt::format("{} {} {}", reader.head().method, reader.head().path,
                                  reader.take_body(share)));
      reader.next();
      if (piece.empty()) break;
    }
  }
  found.push_back(reader.begun() ? "cut off" : "end");
  return found;
}

}  // namespace
}  // namespace twell

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static twell::EchoServer server;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const std::vector<std::string> whole = twell::requests_of(bytes, bytes.size());
  for (const size_t most : {1, 7}) {
    TWELL_CHECK(twell::requests_of(bytes, most) == whole, "cut at {}: other requests", most);
  }
  const std::string reply = twell::talk(server.port(), bytes);
  TWELL_CHECK(reply.empty() || reply.starts_with("HTTP/1.1 "), "no HTTP: {}", reply);
  return 0;
}
