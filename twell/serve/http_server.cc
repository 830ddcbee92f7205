// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/http_server.h"

#include <httplib.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>

#include "twell/base/error.h"

namespace twell {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Threads beyond the allowed connections, which tell further clients that the server is busy.
constexpr int64_t kRefusingThreads = 4;
constexpr milliseconds kStopCheck{100};  // how often an idle connection looks for stop()
constexpr int kBacklog = 1024;           // connections that wait for a thread

// Waits until the socket has one of the events, at most until the deadline.
bool wait_for(int socket, short events, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
    pollfd waiting{.fd = socket, .events = events, .revents = 0};
    const int count = ::poll(&waiting, 1, static_cast<int>(std::max<int64_t>(left, 0)));
    if (count > 0) return true;
    if (count == 0 || errno != EINTR) return false;
  }
}

// A client's socket with a budget of bytes and time for each request.
class Connection final : public httplib::Stream {
 public:
  Connection(int socket, const HttpLimits& limits) : socket_(socket), limits_(limits) {}

  // Waits for the first byte of the next request. False at the end of the connection.
  bool next_request(const std::atomic<bool>& stopping) {
    const Clock::time_point deadline = Clock::now() + limits_.keep_alive;
    bytes_left_ = limits_.header_bytes;
    refusal.reset();
    while (begin_ == end_) {
      if (stopping || Clock::now() >= deadline) return false;
      const bool arrived = wait_for(socket_, POLLIN, std::min(deadline, Clock::now() + kStopCheck));
      deadline_ = Clock::now() + limits_.read;
      if (arrived && !fill()) return false;
    }
    deadline_ = Clock::now() + limits_.read;
    return true;
  }
  // The headers are complete: allows the body, in chunks with their sizes if need be.
  void allow_body() { bytes_left_ = 2 * limits_.body_bytes + limits_.header_bytes; }

  // Whether the client has closed neither the connection nor its sending half.
  bool connected() const {
    pollfd waiting{.fd = socket_, .events = POLLRDHUP, .revents = 0};
    return ::poll(&waiting, 1, 0) <= 0;
  }

  // Closes the socket. Bytes that the client still sends are read for a moment, because closing
  // with unread input would discard the reply.
  void close() {
    ::shutdown(socket_, SHUT_WR);
    deadline_ = Clock::now() + std::chrono::seconds(1);
    while (fill()) {
    }
    ::close(socket_);
  }

  bool is_readable() const override {
    return begin_ < end_ || wait_for(socket_, POLLIN, deadline_);
  }
  bool is_writable() const override {
    return wait_for(socket_, POLLOUT, Clock::now() + limits_.write);
  }
  ssize_t read(char* bytes, size_t size) override {
    if (begin_ == end_ && !fill()) return -1;
    const size_t count = std::min({size, end_ - begin_, static_cast<size_t>(bytes_left_)});
    if (count == 0) return -1;
    std::memcpy(bytes, buffer_.data() + begin_, count);
    begin_ += count;
    bytes_left_ -= static_cast<int64_t>(count);
    return static_cast<ssize_t>(count);
  }
  ssize_t write(const char* bytes, size_t size) override {
    constexpr size_t kPiece = size_t{64} << 10;
    for (size_t sent = 0; sent < size;) {
      const Clock::time_point deadline = Clock::now() + limits_.write;
      const size_t end = std::min(size, sent + kPiece);
      while (sent < end) {
        const ssize_t count =
            ::send(socket_, bytes + sent, end - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (count > 0) {
          sent += static_cast<size_t>(count);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
          if (!wait_for(socket_, POLLOUT, deadline)) return -1;
        } else if (errno != EINTR) {
          return -1;
        }
        if (Clock::now() >= deadline) return -1;
      }
    }
    return static_cast<ssize_t>(size);
  }
  void get_remote_ip_and_port(std::string&, int&) const override {}
  void get_local_ip_and_port(std::string&, int&) const override {}
  socket_t socket() const override { return socket_; }

  // The reply to a request that is refused before its body is read; it ends the connection.
  std::optional<HttpReply> refusal;
  bool ends = false;

 private:
  bool fill() {
    begin_ = end_ = 0;
    while (Clock::now() < deadline_ && wait_for(socket_, POLLIN, deadline_)) {
      const ssize_t count = ::recv(socket_, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
      if (count > 0) {
        end_ = static_cast<size_t>(count);
        return true;
      }
      if (count == 0 || (errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK)) return false;
    }
    return false;
  }

  const int socket_;
  const HttpLimits& limits_;
  Clock::time_point deadline_;
  int64_t bytes_left_ = 0;
  std::array<char, 16 << 10> buffer_;
  size_t begin_ = 0, end_ = 0;
};

// Finds the connection of a request. The library has no field for it, but a callback that only its
// clients use.
struct ConnectionLink {
  Connection* connection;
  bool operator()(const httplib::Response&) const { return true; }
};
Connection& connection_of(const httplib::Request& request) {
  return *request.response_handler.target<ConnectionLink>()->connection;
}

HttpRequest to_request(const httplib::Request& from) {
  Connection& connection = connection_of(from);
  return {.method = from.method,
          .path = from.path,
          .authorization = from.get_header_value("Authorization"),
          .body = {},
          .connected = [&connection] { return connection.connected(); }};
}

void send_reply(HttpReply reply, httplib::Response& to) {
  to.status = reply.status;
  for (const auto& [name, value] : reply.headers) to.set_header(name, value);
  if (!reply.stream) {
    to.set_content(reply.body, reply.type);
    return;
  }
  to.set_chunked_content_provider(
      reply.type, [stream = std::move(reply.stream)](size_t, httplib::DataSink& sink) {
        bool good = true;
        try {
          stream([&](std::string_view piece) {
            good = good && sink.write(piece.data(), piece.size());
            return good;
          });
        } catch (const std::exception&) {
          return false;
        }
        if (good) sink.done();
        return good;
      });
}

// Threads that take connections in order of arrival. Unlike the library's pool, it throws when the
// system has no more threads, and the process lives on.
class ConnectionThreads final : public httplib::TaskQueue {
 public:
  // stopping: set by shutdown(), which the library calls when it accepts no more connections.
  ConnectionThreads(int64_t count, std::atomic<bool>& stopping) : stopping_(stopping) {
    try {
      while (std::ssize(threads_) < count) threads_.emplace_back([this] { work(); });
    } catch (const std::system_error& error) {
      const size_t started = threads_.size();
      shutdown();
      throw InputError(fmt::format(
          "only {} of {} threads could be started, one for each connection ({}): allow fewer "
          "connections or more threads and memory",
          started, count, error.code().message()));
    }
  }
  ~ConnectionThreads() override { shutdown(); }

  // From version 0.14 on it returns whether the task was taken.
  using Taken = decltype(std::declval<httplib::TaskQueue&>().enqueue(std::function<void()>()));
  Taken enqueue(std::function<void()> task) override {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    arrived_.notify_one();
    return Taken(true);
  }
  void shutdown() override {
    stopping_ = true;
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    arrived_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  // Until there are no more tasks.
  void work() {
    while (true) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        arrived_.wait(lock, [&] { return closed_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  std::atomic<bool>& stopping_;
  std::mutex mutex_;  // guards tasks_ and closed_
  std::condition_variable arrived_;
  std::deque<std::function<void()>> tasks_;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

struct HttpServer::Impl : httplib::Server {
  using Handler = HttpServer::Handler;

  Impl(const HttpLimits& limits_in, ErrorBody error_body_in, Admit admit_in)
      : limits(limits_in), error_body(std::move(error_body_in)), admit(std::move(admit_in)) {
    new_task_queue = [this] {
      return new ConnectionThreads(limits.connections + kRefusingThreads, stopping);
    };
    set_tcp_nodelay(true);                              // a token is sent at once
    set_keep_alive_timeout(limits.keep_alive.count());  // as replies promise it
    set_keep_alive_max_count(std::numeric_limits<int32_t>::max());
    set_payload_max_length(static_cast<size_t>(limits.body_bytes));
    // The library's default would let a second server share the port.
    set_socket_options([](socket_t socket) {
      const int yes = 1;
      ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    });
    set_pre_routing_handler([this](const httplib::Request& from, httplib::Response& to) {
      Connection& connection = connection_of(from);
      if (connection.refusal) {
        send_reply(*connection.refusal, to);
        return HandlerResponse::Handled;
      }
      if (from.method == "POST") return HandlerResponse::Unhandled;
      const Handler* handler = find_get(from.path);
      answer(*handler, to_request(from), to);
      return HandlerResponse::Handled;
    });
    set_error_handler([this](const httplib::Request&, httplib::Response& to) {
      if (!to.body.empty()) return;
      const std::string message =
          to.status == 400
              ? fmt::format(
                    "the request is not HTTP, came too slowly, or its headers are longer "
                    "than {} bytes",
                    limits.header_bytes)
              : fmt::format("the request cannot be answered (status {})", to.status);
      to.set_content(error_body(to.status, message), "application/json");
    });
  }

  HttpReply failure(int status, const std::string& message) const {
    return {.status = status, .body = error_body(status, message)};
  }

  const Handler* find_get(const std::string& path) const {
    if (const auto found = gets.find(path); found != gets.end()) return &found->second;
    for (const auto& [prefix, handler] : gets_below) {
      if (path.starts_with(prefix)) return &handler;
    }
    return nullptr;
  }

  // The refusal of a request whose headers are read.
  std::optional<HttpReply> refuse(const httplib::Request& request) const {
    const bool get = request.method == "GET" || request.method == "HEAD";
    const bool getable = find_get(request.path) != nullptr, postable = posts.contains(request.path);
    if (!getable && !postable) return failure(404, "there is no " + request.path);
    if (!(get ? getable : request.method == "POST" && postable)) {
      HttpReply reply =
          failure(405, fmt::format("{} does not take {}", request.path, request.method));
      reply.headers.emplace_back("Allow", postable ? "POST" : "GET, HEAD");
      return reply;
    }
    if (std::optional<HttpReply> reply = admit(to_request(request))) return reply;
    if (get) return std::nullopt;
    const std::string type = request.get_header_value("Content-Type");
    if (!type.starts_with("application/json")) {
      return failure(415, "the body must be JSON: send Content-Type: application/json");
    }
    const std::string length = request.get_header_value("Content-Length");
    if (length.size() > 15 || std::atoll(length.c_str()) > limits.body_bytes) return too_large();
    return std::nullopt;
  }

  HttpReply too_large() const {
    return failure(413, fmt::format("the body is larger than {} bytes", limits.body_bytes));
  }

  void answer(const Handler& handler, HttpRequest request, httplib::Response& to) const {
    try {
      send_reply(handler(request), to);
    } catch (const std::exception& error) {
      send_reply(failure(500, error.what()), to);
    }
  }

  void add_post(const std::string& path, Handler handler) {
    posts.emplace(path);
    Post(path,
         [this, handler = std::move(handler)](const httplib::Request& from, httplib::Response& to,
                                              const httplib::ContentReader& read) {
           HttpRequest request = to_request(from);
           bool fits = true;
           const bool complete = read([&](const char* bytes, size_t count) {
             fits = request.body.size() + count <= static_cast<size_t>(limits.body_bytes);
             if (fits) request.body.append(bytes, count);
             return fits;
           });
           if (complete && fits) return answer(handler, std::move(request), to);
           connection_of(from).ends = true;
           const int status = to.status;
           if (!fits || status == 413) return send_reply(too_large(), to);
           send_reply(failure(400,
                              "the body is shorter than its length, came too slowly, or its "
                              "encoding is not readable"),
                      to);
         });
  }

  // Hides the difference between versions: from 0.15 on, the addresses are arguments.
  template <typename Setup>
  static bool process(auto& self, Connection& connection, bool last, bool& closed,
                      const Setup& setup) {
    const std::function<void(httplib::Request&)> function = setup;
    if constexpr (requires { self.process_request(connection, last, closed, function); }) {
      return self.process_request(connection, last, closed, function);
    } else {
      return self.process_request(connection, "", 0, "", 0, last, closed, function);
    }
  }

  void serve(Connection& connection) {
    while (!stopping && connection.next_request(stopping)) {
      bool closed = false;
      const auto setup = [&](httplib::Request& request) {
        request.response_handler = ConnectionLink{&connection};
        request.ranges.clear();  // replies are always whole
        connection.refusal = refuse(request);
        connection.allow_body();
        // The body of a refused request is not read, so nothing can follow it.
        if (!connection.refusal) return;
        connection.ends = true;
        request.headers.erase("Connection");
        request.set_header("Connection", "close");
      };
      if (!process(*this, connection, false, closed, setup)) return;
      if (closed || connection.ends) return;
    }
  }

  bool process_and_close_socket(socket_t socket) override {
    Connection connection(socket, limits);
    try {
      serve_or_refuse(socket, connection);
    } catch (const std::exception&) {
      // Out of memory, most likely: this connection ends, the others go on.
    }
    connection.close();
    --active;
    return true;
  }

  void serve_or_refuse(socket_t socket, Connection& connection) {
    if (++active > limits.connections) {
      const std::string body = error_body(503, "too many connections; try again later");
      const std::string reply = fmt::format(
          "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
          "Connection: close\r\nContent-Length: {}\r\n\r\n{}",
          body.size(), body);
      ::send(socket, reply.data(), reply.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    } else {
      serve(connection);
    }
  }

  // Without a limit of its own here the library would let five connections wait.
  void widen_backlog() { ::listen(svr_sock_, kBacklog); }

  const HttpLimits limits;
  const ErrorBody error_body;
  const Admit admit;
  std::map<std::string, Handler> gets;
  std::vector<std::pair<std::string, Handler>> gets_below;
  std::set<std::string> posts;
  std::atomic<int64_t> active{0};
  // stopping: connections end. told: by stop().
  std::atomic<bool> stopping{false}, told{false}, started{false}, returned{false};
};

HttpServer::HttpServer(const HttpLimits& limits, ErrorBody error_body, Admit admit)
    : impl_(std::make_unique<Impl>(limits, std::move(error_body), std::move(admit))) {}

HttpServer::~HttpServer() = default;

void HttpServer::get(const std::string& path, Handler handler) {
  impl_->gets.emplace(path, std::move(handler));
}

void HttpServer::get_below(const std::string& prefix, Handler handler) {
  impl_->gets_below.emplace_back(prefix, std::move(handler));
}

void HttpServer::post(const std::string& path, Handler handler) {
  impl_->add_post(path, std::move(handler));
}

int HttpServer::bind(const std::string& host, int port) {
  TWELL_REQUIRE(port >= 0 && port <= 65535, "port {} is not between 0 and 65535", port);
  errno = 0;
  int bound = port;
  if (port == 0) {
    bound = impl_->bind_to_any_port(host);
  } else if (!impl_->bind_to_port(host, port)) {
    bound = -1;
  }
  const int fault = errno;
  TWELL_REQUIRE(bound > 0, "cannot listen on {}:{}: {}{}", host, port,
                fault == 0 ? "no such address on this machine" : std::strerror(fault),
                fault == EADDRINUSE ? "; choose another --port, or 0 for any that is free" : "");
  impl_->widen_backlog();
  return bound;
}

void HttpServer::run() {
  impl_->started = true;
  struct Return {
    ~Return() { returned = true; }
    std::atomic<bool>& returned;
  } const at_the_end{impl_->returned};
  if (impl_->told) return;
  impl_->listen_after_bind();
  TWELL_REQUIRE(impl_->told, "the server cannot accept connections any more");
}

void HttpServer::stop() {
  impl_->told = impl_->stopping = true;
  // The library ignores stop() until it listens.
  while (impl_->started && !impl_->returned && !impl_->is_running()) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  impl_->httplib::Server::stop();
}

}  // namespace twell
