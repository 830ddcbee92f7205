// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/http_server.h"

#include <fmt/core.h>
#include <malloc.h>
#include <poll.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <cerrno>
#include <cstring>
#include <map>
#include <system_error>
#include <thread>
#include <unordered_set>

#include "twell/base/error.h"
#include "twell/serve/http_encoding.h"
#include "twell/serve/http_reader.h"

namespace twell {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using Ec = boost::system::error_code;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr size_t kPiece = size_t{64} << 10;  // of a reading or writing
// Bytes behind a request in progress that are read already. The end of the connection stands behind
// them, so a client that sends more is looked at from time to time.
constexpr size_t kAheadBytes = size_t{16} << 10;
constexpr milliseconds kLook{100};
constexpr seconds kLinger{1};        // for a client to stop sending what nobody reads
constexpr seconds kHurriedWrite{2};  // HttpLimits::write while the server stops
constexpr milliseconds kAcceptPause{100};
constexpr int64_t kRefusedAtOnce = 256;  // connections beyond the limit that are told so
constexpr int64_t kOtherFiles = 64;      // that the process opens besides connections
constexpr size_t kCompressBytes = 1024;  // shorter replies are sent as they are
// The C library keeps memory that was freed between blocks in use. After so many bytes of bodies it
// is given back.
constexpr int64_t kTrimBytes = int64_t{1} << 20;
constexpr seconds kTrimPause{1};

constexpr const char* kContinue = "HTTP/1.1 100 Continue\r\n\r\n";

std::string_view reason_of(int status) {
  static constexpr std::pair<int, std::string_view> kReasons[] = {
      {200, "OK"},
      {400, "Bad Request"},
      {401, "Unauthorized"},
      {403, "Forbidden"},
      {404, "Not Found"},
      {405, "Method Not Allowed"},
      {413, "Content Too Large"},
      {415, "Unsupported Media Type"},
      {417, "Expectation Failed"},
      {499, "Client Closed Request"},
      {503, "Service Unavailable"},
  };
  for (const auto& [known, reason] : kReasons) {
    if (status == known) return reason;
  }
  return "Internal Server Error";
}

int64_t io_threads() { return std::clamp<int64_t>(std::thread::hardware_concurrency() / 2, 2, 4); }
int64_t worker_threads() {
  return std::clamp<int64_t>(std::thread::hardware_concurrency() / 2, 2, 8);
}

// Runs a loop until it has no more work. A connection closes itself when one of its handlers
// throws; whatever else does (out of memory) ends one handler alone.
void run_loop(asio::io_context& io) {
  while (true) {
    try {
      io.run();
      return;
    } catch (const std::exception&) {
    }
  }
}

using WorkGuard = asio::executor_work_guard<asio::io_context::executor_type>;

class Connection;

// A thread with its connections, which no other thread touches.
struct Loop {
  asio::io_context io{1};
  std::optional<WorkGuard> work{io.get_executor()};
  std::unordered_set<std::shared_ptr<Connection>> connections;
  std::vector<char> scratch = std::vector<char>(kPiece);  // what is read passes through here
  std::thread thread;
};

}  // namespace

struct HttpServer::Impl {
  using Handler = HttpServer::Handler;
  struct Route {
    const Handler* get = nullptr;
    const Handler* post = nullptr;
  };

  Impl(const HttpLimits& limits_in, MemoryBudget& budget_in, ErrorBody error_body_in,
       Admit admit_in)
      : limits(limits_in),
        budget(budget_in),
        error_body(std::move(error_body_in)),
        admit(std::move(admit_in)),
        loops(static_cast<size_t>(io_threads())),
        acceptor(loops[0].io),
        accept_timer(loops[0].io),
        trim_timer(loops[0].io) {}

  HttpReply failure(int status, const std::string& message) const {
    HttpReply reply{.status = status, .body = error_body(status, message)};
    if (status == 503) reply.headers.emplace_back("Retry-After", "1");
    return reply;
  }

  Route route(const std::string& path) const {
    Route route;
    if (const auto get = gets.find(path); get != gets.end()) route.get = &get->second;
    for (const auto& [prefix, handler] : gets_below) {
      if (route.get == nullptr && path.starts_with(prefix)) route.get = &handler;
    }
    if (const auto post = posts.find(path); post != posts.end()) route.post = &post->second;
    return route;
  }

  // The refusal of a request whose head is read.
  std::optional<HttpReply> refuse(const HttpHead& head, const HttpRequest& request) const {
    const bool get = head.method == "GET" || head.method == "HEAD";
    const Route handlers = route(head.path);
    if (handlers.get == nullptr && handlers.post == nullptr) {
      return failure(404, "there is no " + head.path);
    }
    // Browsers ask without a key.
    if (head.method == "OPTIONS" && head.cross.is_preflight() && !origins.empty()) {
      if (origins.allow(head.cross.origin)) return HttpReply{.body = {}};
      return failure(403,
                     "pages of this origin may not use this server; start it with "
                     "--cors-origin if they are meant to");
    }
    if (get ? handlers.get == nullptr : head.method != "POST" || handlers.post == nullptr) {
      HttpReply reply = failure(405, fmt::format("{} does not take {}", head.path, head.method));
      reply.headers.emplace_back("Allow", handlers.post != nullptr ? "POST" : "GET, HEAD");
      return reply;
    }
    if (std::optional<HttpReply> reply = admit(request)) return reply;
    const std::string expect = first_value(head.expect);
    if (!expect.empty() && expect != "100-continue") {
      return failure(417, "the only expectation that is met is 100-continue");
    }
    if (head.length && *head.length > static_cast<uint64_t>(limits.body_bytes)) {
      return failure(413, fmt::format("the body is longer than {} bytes", limits.body_bytes));
    }
    if (get) return std::nullopt;
    if (first_value(head.content_type) != "application/json") {
      return failure(415, "the body must be JSON: send Content-Type: application/json");
    }
    return std::nullopt;
  }

  // The reply of a handler, or what becomes of its exception.
  HttpReply answer(const Handler& handler, const HttpRequest& request) const {
    try {
      return handler(request);
    } catch (const std::exception& error) {
      return failure(500, error.what());
    }
  }

  // The reply to a POST request. Runs on a worker thread.
  HttpReply answer_post(const HttpHead& head, HttpRequest& request) {
    try {
      switch (
          decode_body(head.content_encoding, limits.body_bytes, *request.memory, request.body)) {
        case Decoded::kGood:
          break;
        case Decoded::kUnknownEncoding: {
          HttpReply reply = failure(415, "the body's encoding must be gzip, deflate or none");
          reply.headers.emplace_back("Accept-Encoding", "gzip, deflate");
          return reply;
        }
        case Decoded::kTooLong:
          return failure(413, fmt::format("the body is longer than {} bytes after decompression",
                                          limits.body_bytes));
        case Decoded::kBroken:
          return failure(400, "the body's encoding is not readable");
        case Decoded::kNoMemory:
          return failure(503, "the server has no room for the request now; try again later");
      }
      return answer(*route(head.path).post, request);
    } catch (const std::exception& error) {
      return failure(500, error.what());
    }
  }

  // Work that may take long. Keeps the loop going, which hears of its end.
  void work_for(Loop& loop, std::function<void()> work) {
    asio::post(workers, [guard = std::make_shared<WorkGuard>(loop.io.get_executor()),
                         work = std::move(work)] { work(); });
  }

  // Notes that a body of so many bytes has been worked on.
  void note_body(int64_t bytes) {
    if ((untrimmed += bytes) < kTrimBytes || trimming.exchange(true)) return;
    asio::post(loops[0].io, [this] {
      if (told) return;
      trim_timer.expires_after(kTrimPause);
      trim_timer.async_wait([this](Ec error) {
        trimming = false;
        if (error) return;
        untrimmed = 0;
        asio::post(workers, [] { ::malloc_trim(0); });
      });
    });
  }

  void accept();
  void accepted(Ec error, Loop& loop, tcp::socket socket);
  void start_threads();
  void stop_loops();
  void join();

  const HttpLimits limits;
  MemoryBudget& budget;
  const ErrorBody error_body;
  const Admit admit;
  AllowedOrigins origins;
  std::function<void(const HttpRecord& record)> log;
  std::map<std::string, Handler> gets;
  std::vector<std::pair<std::string, Handler>> gets_below;
  std::map<std::string, Handler> posts;

  std::vector<Loop> loops;
  asio::io_context workers;
  std::optional<WorkGuard> workers_work{workers.get_executor()};
  std::vector<std::thread> worker_list;
  tcp::acceptor acceptor;
  asio::steady_timer accept_timer, trim_timer;
  std::string accept_fault;  // of the first loop
  int64_t accepted_count = 0;
  std::atomic<int64_t> active{0}, refused{0}, untrimmed{0};
  std::atomic<bool> trimming{false}, hurried{false};
  std::atomic<bool> told{false};  // by stop()
};

namespace {

// A client's connection. All is called on its loop's thread.
class Connection final : public std::enable_shared_from_this<Connection> {
 public:
  using Server = HttpServer::Impl;

  Connection(Server& server, Loop& loop, tcp::socket socket, int64_t number, bool refused)
      : server_(server),
        loop_(loop),
        socket_(std::move(socket)),
        timer_(loop.io),
        reader_({server.limits.header_bytes, server.limits.body_bytes}, server.budget),
        number_(number),
        refused_(refused) {
    ++count();
  }
  ~Connection() { --count(); }

  void start() {
    guarded([&] {
      Ec ignored;
      socket_.set_option(tcp::no_delay(true), ignored);  // a token is sent at once
      socket_.non_blocking(true, ignored);
      if (refused_) {
        phase_ = Phase::kAnswering;
        return send(server_.failure(503, "too many connections; try again later"), Last::kYes);
      }
      set_deadline(server_.limits.keep_alive);
      watch();
    });
  }

  // The server stops.
  void stop() {
    guarded([&] {
      if (phase_ == Phase::kReading || stream_ || later_) return close();
      keep_ = false;
      hurry();
    });
  }
  void hurry() {
    if (writing_) set_deadline(std::min(server_.limits.write, kHurriedWrite));
  }

 private:
  enum class Phase { kReading, kAnswering, kLingering, kClosed };
  enum class Last { kNo, kYes };

  std::atomic<int64_t>& count() const { return refused_ ? server_.refused : server_.active; }

  // Runs a step of the connection, which closes when it throws.
  template <typename Function>
  void guarded(const Function& function) {
    try {
      if (phase_ != Phase::kClosed) function();
    } catch (const std::exception&) {
      close();
    }
  }
  // A callback of Asio or of another thread that keeps the connection alive.
  template <typename Function>
  auto callback(Function function) {
    return [self = shared_from_this(), function = std::move(function)](auto... values) {
      self->guarded([&] { function(values...); });
    };
  }

  void close() {
    if (phase_ == Phase::kClosed) return;
    phase_ = Phase::kClosed;
    if (record_) record_->status = 499;
    log();
    stream_.reset();
    later_.reset();
    Ec ignored;
    timer_.cancel(ignored);
    if (look_timer_) look_timer_->cancel(ignored);
    socket_.close(ignored);
    loop_.connections.erase(shared_from_this());
  }

  // Time limits: one at a time, which a later call replaces.
  void set_deadline(Clock::duration from_now) { set_deadline(Clock::now() + from_now); }
  void set_deadline(Clock::time_point at) {
    deadline_ = at;
    if (!timer_at_ || *deadline_ < *timer_at_) arm();
  }
  void clear_deadline() { deadline_.reset(); }
  void arm() {
    timer_at_ = deadline_;
    timer_.expires_at(*deadline_);
    timer_.async_wait(callback([this](Ec error) {
      if (error) return;  // another one is armed
      timer_at_.reset();
      if (!deadline_) return;
      if (Clock::now() < *deadline_) return arm();
      deadline_.reset();
      if (phase_ == Phase::kReading && !writing_ && reader_.begun()) {
        phase_ = Phase::kAnswering;
        return send(server_.failure(400, fmt::format("the request took longer than {} s",
                                                     server_.limits.read.count())),
                    Last::kYes);
      }
      close();
    }));
  }

  // Waits for bytes or the end of what the client sends.
  void watch() {
    if (watching_ || input_ended_) return;
    if (ahead_.size() >= kAheadBytes) return look();
    watching_ = true;
    socket_.async_wait(tcp::socket::wait_read, callback([this](Ec error) {
                         watching_ = false;
                         if (error) return close();
                         read();
                       }));
  }
  void look() {
    if (look_timer_) return;
    look_timer_.emplace(loop_.io, kLook);
    look_timer_->async_wait(callback([this](Ec error) {
      look_timer_.reset();
      if (error) return;
      pollfd waiting{.fd = socket_.native_handle(), .events = POLLRDHUP, .revents = 0};
      if (::poll(&waiting, 1, 0) > 0) return gone();
      watch();
    }));
  }

  void read() {
    Ec error;
    const size_t count = socket_.read_some(asio::buffer(loop_.scratch), error);
    if (error == asio::error::would_block || error == asio::error::interrupted) return watch();
    if (error && error != asio::error::eof) return close();
    input_ended_ = error == asio::error::eof;
    std::string_view bytes(loop_.scratch.data(), input_ended_ ? 0 : count);
    switch (phase_) {
      case Phase::kReading:
        if (writing_) break;  // "100 Continue" goes first
        return parse(bytes);
      case Phase::kAnswering:
        break;
      case Phase::kLingering:
        if (input_ended_) return close();
        return watch();
      case Phase::kClosed:
        return;
    }
    ahead_ += bytes;
    if (input_ended_) return gone();
    watch();
  }

  // Nothing more comes from the client. What still has to be made is for nobody.
  void gone() {
    if (stream_) return close();
    if (later_) {
      later_.reset();
      send(server_.failure(499, "the client has closed the connection"), Last::kYes);
    }
  }

  void parse(std::string_view bytes) {
    while (phase_ == Phase::kReading && !writing_) {
      if (!reader_.begun() && !bytes.empty()) {
        read_end_ = Clock::now() + server_.limits.read;
        set_deadline(read_end_);
      }
      switch (reader_.read(bytes)) {
        case HttpReader::Step::kMore:
          if (input_ended_) return cut_off();
          return watch();
        case HttpReader::Step::kHead:
          begin(bytes.empty());
          break;
        case HttpReader::Step::kDone:
          clear_deadline();
          phase_ = Phase::kAnswering;
          serve();
          break;
        case HttpReader::Step::kFault: {
          phase_ = Phase::kAnswering;
          const HttpFault& fault = reader_.fault();
          send(server_.failure(fault.status, fault.message), Last::kYes);
          return watch();  // the rest of the bytes is lost with the connection
        }
      }
    }
    if (phase_ == Phase::kClosed) return;
    ahead_ = bytes;
    watch();
  }
  void cut_off() {
    if (!reader_.begun()) return close();
    phase_ = Phase::kAnswering;
    send(server_.failure(400, "the request ends in the middle"), Last::kYes);
  }

  // The head of a request is read.
  void begin(bool nothing_follows) {
    const HttpHead& head = reader_.head();
    origin_headers_ = server_.origins.headers(head.cross);
    if (server_.log) {
      begun_ = Clock::now();
      record_ = HttpRecord{
          .time = std::chrono::system_clock::now(), .method = head.method, .path = head.path};
    }
    request_ = std::make_shared<HttpRequest>();
    request_->method = head.method;
    request_->path = head.path;
    request_->host = head.host;
    request_->authorization = head.authorization;
    request_->api_key = head.api_key;
    request_->connection = number_;
    head_only_ = head.method == "HEAD";
    keep_ = head.keep_alive;
    gzip_ = accepts_gzip(head.accept_encoding);
    if (std::optional<HttpReply> refusal = server_.refuse(head, *request_)) {
      phase_ = Phase::kAnswering;
      return send(std::move(*refusal), Last::kYes);  // its body is not read
    }
    const bool has_body = !head.length || *head.length > 0;
    if (!head.expect.empty() && has_body && nothing_follows && head.version == 11) {
      write(kContinue);
    }
  }

  // The request is complete.
  void serve() {
    request_->memory = std::make_shared<MemoryBudget::Share>(server_.budget);
    request_->body = reader_.take_body(*request_->memory);
    if (request_->method != "POST") {
      HttpReply reply = server_.answer(*server_.route(request_->path).get, *request_);
      request_.reset();
      compress(reply);
      return answer(std::move(reply));
    }
    server_.work_for(loop_, [self = shared_from_this(), head = reader_.head(),
                             request = std::move(request_)]() mutable {
      const int64_t size = std::ssize(request->body);
      HttpReply reply = self->server_.answer_post(head, *request);
      self->server_.note_body(std::max(size, std::ssize(request->body)));
      request.reset();
      self->compress(reply);
      self->hand_over(std::move(reply));
    });
  }

  // Passes work from a worker thread to the connection's.
  void hand_over(HttpReply reply) {
    asio::post(loop_.io, callback([this, reply = std::make_shared<HttpReply>(std::move(reply))] {
                 answer(std::move(*reply));
               }));
  }

  void compress(HttpReply& reply) const {
    if (!gzip_ || reply.stream || reply.later || reply.body.size() < kCompressBytes) return;
    reply.body = gzip(reply.body);
    reply.headers.emplace_back("Content-Encoding", "gzip");
    reply.headers.emplace_back("Vary", "Accept-Encoding");
  }

  void answer(HttpReply reply) {
    if (!reply.later && !reply.stream) return send(std::move(reply), Last::kNo);
    if (server_.told) return close();
    if (reply.later) {
      later_ = std::move(reply.later);
      if (input_ended_) return gone();
      later_->notify(ready([this] { look_at_later(); }));
      return watch();
    }
    if (input_ended_) return close();
    const bool chunked = reader_.head().version == 11;
    keep_ = keep_ && chunked;
    chunked_ = chunked;
    stream_ = reply.stream;
    note(reply);
    write(head_text(reply, std::nullopt));
    stream_->notify(ready([this] { pump(); }));
    watch();
  }

  // A function that any thread calls while the pending reply lives, hence this connection too.
  template <typename Function>
  std::function<void()> ready(Function function) {
    return [this, weak = weak_from_this(), function = std::move(function)] {
      if (const std::shared_ptr<Connection> self = weak.lock()) {
        asio::post(loop_.io, self->callback(function));
      }
    };
  }

  void look_at_later() {
    if (!later_ || working_) return;
    working_ = true;
    server_.work_for(loop_, [self = shared_from_this(), later = later_]() mutable {
      std::optional<HttpReply> reply;
      try {
        reply = later->reply();
      } catch (const std::exception& error) {
        reply = self->server_.failure(500, error.what());
      }
      if (reply) self->compress(*reply);
      later.reset();
      auto shared = std::make_shared<std::optional<HttpReply>>(std::move(reply));
      asio::post(self->loop_.io, self->callback([self = self.get(), shared] {
        self->working_ = false;
        if (!self->later_ || !*shared) return;
        self->later_.reset();
        self->answer(std::move(**shared));
      }));
    });
  }

  // Sends what the stream has by now.
  void pump() {
    if (!stream_ || writing_) return;
    std::string piece;
    const HttpStream::State state = stream_->next(piece);
    std::string out;
    if (chunked_ && !piece.empty()) out = fmt::format("{:x}\r\n{}\r\n", piece.size(), piece);
    if (!chunked_) out = std::move(piece);
    if (state == HttpStream::State::kEnds) {
      stream_.reset();
      if (chunked_) out += "0\r\n\r\n";
    }
    if (!out.empty()) return write(std::move(out));
    if (!stream_) end_reply();
  }

  std::string head_text(const HttpReply& reply, std::optional<size_t> length) const {
    std::string text = fmt::format("HTTP/1.1 {} {}\r\nContent-Type: {}\r\n", reply.status,
                                   reason_of(reply.status), reply.type);
    for (const auto& [name, value] : reply.headers) text += fmt::format("{}: {}\r\n", name, value);
    for (const auto& [name, value] : origin_headers_) {
      text += fmt::format("{}: {}\r\n", name, value);
    }
    if (length) {
      text += fmt::format("Content-Length: {}\r\n", *length);
    } else if (chunked_) {
      text += "Transfer-Encoding: chunked\r\n";
    }
    if (keep_) {
      text += fmt::format("Connection: keep-alive\r\nKeep-Alive: timeout={}\r\n",
                          server_.limits.keep_alive.count());
    } else {
      text += "Connection: close\r\n";
    }
    return text + "\r\n";
  }

  // Sends a whole reply, the connection's last one or not.
  void send(HttpReply reply, Last last) {
    keep_ = keep_ && last == Last::kNo && !server_.told;
    note(reply);
    std::string text = head_text(reply, reply.body.size());
    if (!head_only_) text += reply.body;
    write(std::move(text));
  }

  void write(std::string text) {
    writing_ = true;
    out_ = std::move(text);
    sent_ = 0;
    write_piece();
  }
  void write_piece() {
    const seconds limit = server_.hurried || server_.told
                              ? std::min(server_.limits.write, kHurriedWrite)
                              : server_.limits.write;
    set_deadline(limit);
    const size_t count = std::min(kPiece, out_.size() - sent_);
    asio::async_write(socket_, asio::buffer(out_.data() + sent_, count),
                      callback([this](Ec error, size_t done) {
                        if (error) return close();
                        sent_ += done;
                        if (sent_ < out_.size()) return write_piece();
                        written();
                      }));
  }
  void written() {
    writing_ = false;
    out_ = {};
    clear_deadline();
    if (phase_ == Phase::kReading) {  // "100 Continue"
      set_deadline(read_end_);
      return parse(std::exchange(ahead_, {}));
    }
    if (stream_) return pump();
    end_reply();
  }

  // For the log: what is sent for the request in progress.
  void note(const HttpReply& reply) {
    if (record_) record_->status = reply.status;
    usage_ = reply.usage;
  }
  // The request in progress has ended.
  void log() {
    if (!record_) return;
    record_->seconds = std::chrono::duration<double>(Clock::now() - begun_).count();
    if (usage_) record_->usage = *usage_;
    server_.log(*std::exchange(record_, std::nullopt));
    usage_.reset();
  }

  void end_reply() {
    log();
    origin_headers_.clear();
    if (!keep_ || server_.told) return linger();
    reader_.next();
    head_only_ = gzip_ = chunked_ = false;
    phase_ = Phase::kReading;
    set_deadline(server_.limits.keep_alive);
    parse(std::exchange(ahead_, {}));
  }

  // Closing with unread input would discard the reply, so it is read for a moment.
  void linger() {
    if (input_ended_) return close();
    phase_ = Phase::kLingering;
    ahead_ = {};
    Ec ignored;
    socket_.shutdown(tcp::socket::shutdown_send, ignored);
    set_deadline(kLinger);
    watch();
  }

  Server& server_;
  Loop& loop_;
  tcp::socket socket_;
  asio::steady_timer timer_;
  std::optional<Clock::time_point> deadline_, timer_at_;
  Clock::time_point read_end_;  // of the request being read, at the latest
  std::optional<asio::steady_timer> look_timer_;
  HttpReader reader_;
  const int64_t number_;
  const bool refused_;

  Phase phase_ = Phase::kReading;
  bool watching_ = false, input_ended_ = false;
  std::string ahead_;  // bytes behind the request in progress

  // The request in progress.
  std::shared_ptr<HttpRequest> request_;
  bool head_only_ = false, keep_ = true, gzip_ = false;
  std::shared_ptr<HttpStream> stream_;
  std::shared_ptr<HttpLater> later_;
  bool working_ = false;  // a worker thread has later_
  bool chunked_ = false;
  AllowedOrigins::Headers origin_headers_;
  std::optional<HttpRecord> record_;  // nothing where there is no log
  Clock::time_point begun_;
  std::shared_ptr<HttpUsage> usage_;

  bool writing_ = false;
  std::string out_;
  size_t sent_ = 0;
};

// A number of files that includes `connections`, which the process may open.
void check_open_files(int64_t connections) {
  rlimit limit{};
  TWELL_CHECK(::getrlimit(RLIMIT_NOFILE, &limit) == 0, "getrlimit: {}", std::strerror(errno));
  TWELL_REQUIRE(limit.rlim_cur == RLIM_INFINITY ||
                    limit.rlim_cur >= static_cast<rlim_t>(connections + kOtherFiles),
                "{} connections and {} other files are more than the {} that this process may "
                "open: allow fewer connections, or raise the limit (ulimit -n)",
                connections, kOtherFiles, limit.rlim_cur);
}

}  // namespace

void HttpServer::Impl::accept() {
  Loop& loop = loops[static_cast<size_t>(++accepted_count) % loops.size()];
  acceptor.async_accept(loop.io, [this, &loop](Ec error, tcp::socket socket) {
    accepted(error, loop, std::move(socket));
  });
}

void HttpServer::Impl::accepted(Ec error, Loop& loop, tcp::socket socket) {
  if (told) return;
  const bool no_room = error == asio::error::no_descriptors || error == asio::error::no_memory ||
                       error == asio::error::no_buffer_space ||
                       error == boost::system::errc::too_many_files_open_in_system;
  if (no_room) {
    accept_timer.expires_after(kAcceptPause);
    accept_timer.async_wait([this](Ec stopped) {
      if (!stopped && !told) accept();
    });
    return;
  }
  if (error == asio::error::connection_aborted) return accept();
  if (error) {
    accept_fault = error.message();
    return stop_loops();
  }
  const bool over = active >= limits.connections;
  if (!over || refused < kRefusedAtOnce) {
    // Counted here, so that the next one is not let in before this one is seen.
    auto connection =
        std::make_shared<Connection>(*this, loop, std::move(socket), accepted_count, over);
    asio::post(loop.io, [&loop, connection, this] {
      if (told) return;
      loop.connections.insert(connection);
      connection->start();
    });
  }
  accept();
}

void HttpServer::Impl::start_threads() {
  try {
    for (int64_t i = 0; i < worker_threads(); ++i) {
      worker_list.emplace_back([this] { run_loop(workers); });
    }
    for (Loop& loop : loops) loop.thread = std::thread([&loop] { run_loop(loop.io); });
  } catch (const std::system_error& error) {
    stop_loops();
    join();
    throw InputError(fmt::format("the server's {} threads could not be started ({})",
                                 worker_threads() + io_threads(), error.code().message()));
  }
}

void HttpServer::Impl::stop_loops() {
  told = true;
  for (Loop& loop : loops) {
    asio::post(loop.io, [this, &loop] {
      if (&loop == loops.data()) {
        Ec ignored;
        acceptor.close(ignored);
        accept_timer.cancel(ignored);
        trim_timer.cancel(ignored);
      }
      // A connection that closes leaves the set.
      const auto connections = loop.connections;
      for (const auto& connection : connections) connection->stop();
      loop.work.reset();
    });
  }
}

// Waits until the loops have no more work, then for the workers.
void HttpServer::Impl::join() {
  for (Loop& loop : loops) {
    if (loop.thread.joinable()) loop.thread.join();
  }
  workers_work.reset();
  for (std::thread& worker : worker_list) worker.join();
}

HttpServer::HttpServer(const HttpLimits& limits, MemoryBudget& budget, ErrorBody error_body,
                       Admit admit)
    : impl_(std::make_unique<Impl>(limits, budget, std::move(error_body), std::move(admit))) {}

HttpServer::~HttpServer() = default;

void HttpServer::get(const std::string& path, Handler handler) {
  impl_->gets.emplace(path, std::move(handler));
}

void HttpServer::get_below(const std::string& prefix, Handler handler) {
  impl_->gets_below.emplace_back(prefix, std::move(handler));
}

void HttpServer::post(const std::string& path, Handler handler) {
  impl_->posts.emplace(path, std::move(handler));
}

void HttpServer::allow_origins(AllowedOrigins origins) { impl_->origins = std::move(origins); }

void HttpServer::log_to(std::function<void(const HttpRecord& record)> log) {
  impl_->log = std::move(log);
}

int HttpServer::bind(const std::string& host, int port) {
  TWELL_REQUIRE(port >= 0 && port <= 65535, "port {} is not between 0 and 65535", port);
  TWELL_REQUIRE(!host.empty(),
                "cannot listen on an empty address; 127.0.0.1 is this machine alone, 0.0.0.0 every "
                "address");
  check_open_files(impl_->limits.connections);
  Ec error;
  tcp::resolver resolver(impl_->loops[0].io);
  const auto found = resolver.resolve(
      host, std::to_string(port), tcp::resolver::passive | tcp::resolver::numeric_service, error);
  TWELL_REQUIRE(!error && !found.empty(), "cannot listen on {}:{}: {}", host, port,
                error ? error.message() : "no such address");
  const tcp::endpoint endpoint = found.begin()->endpoint();
  tcp::acceptor& acceptor = impl_->acceptor;
  acceptor.open(endpoint.protocol(), error);
  // A restart need not wait for the connections of the last run; two servers never share a port.
  if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
  TWELL_REQUIRE(!error, "cannot listen on {}:{}: {}{}", host, port, error.message(),
                error == asio::error::address_in_use
                    ? "; choose another --port, or 0 for any that is free"
                    : "");
  return acceptor.local_endpoint().port();
}

void HttpServer::run() {
  asio::post(impl_->loops[0].io, [this] {
    if (!impl_->told) impl_->accept();
  });
  if (impl_->told) impl_->stop_loops();
  impl_->start_threads();
  impl_->join();
  TWELL_REQUIRE(impl_->accept_fault.empty(), "the server cannot accept connections any more: {}",
                impl_->accept_fault);
}

void HttpServer::hurry() {
  impl_->hurried = true;
  for (Loop& loop : impl_->loops) {
    asio::post(loop.io, [&loop] {
      for (const auto& connection : loop.connections) connection->hurry();
    });
  }
}

void HttpServer::stop() { impl_->stop_loops(); }

}  // namespace twell
