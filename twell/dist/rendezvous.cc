// SPDX-License-Identifier: Apache-2.0
#include "twell/dist/rendezvous.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

namespace twell {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// The protocol: frames of a length (4 bytes, of what follows), a type and a body.
enum Type : char {
  kJoin = 'J',     // rank: magic, job, rank, ranks
  kHello = 'H',    // server: the rank is accepted
  kRefused = 'R',  // server: reason
  kWelcome = 'W',  // server: all ranks are here; the rank's address
  kPut = 'P',      // rank: key, value
  kGet = 'G',      // rank: key
  kValue = 'V',    // server: key, value
  kAlive = 'A',    // rank: step, calls
  kPong = 'O',     // server: answer to kAlive
  kFail = 'F',     // rank: why it fails; server: the fault
  kStuck = 'T',    // rank: step, calls, what failed
  kBye = 'B',      // rank: it leaves
};
constexpr std::string_view kMagic = "twell-ranks-2";
constexpr std::string_view kAnyMagic = "twell-ranks-";  // of other versions
constexpr size_t kLongestFrame = size_t{64} << 20;
constexpr size_t kLongestJoin = 4096;  // of a connection that is no rank yet
// A connection that does not say its rank in this time is closed. A rank says it at once.
constexpr milliseconds kJoinPatience{5000};
constexpr size_t kMostStrangers = 64;  // connections that are no rank yet

std::string frame(char type, std::string_view body) {
  const auto length = static_cast<uint32_t>(body.size() + 1);
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  bytes += type;
  return bytes.append(body);
}

std::string two(std::string_view first, std::string_view second) {
  return std::string(first).append(1, '\0').append(second);
}

std::pair<std::string, std::string> split_two(const std::string& body) {
  const size_t end = body.find('\0');
  if (end == std::string::npos) return {body, {}};
  return {body.substr(0, end), body.substr(end + 1)};
}

// Cuts a stream of bytes into frames.
class FrameReader {
 public:
  struct Frame {
    char type;
    std::string body;
  };
  explicit FrameReader(size_t longest = kLongestFrame) : longest_(longest) {}
  void allow(size_t longest) { longest_ = longest; }

  // Reads some of what has arrived, without waiting. False when the connection is closed or sends
  // nonsense.
  bool fill(int socket) {
    bytes_.erase(0, begin_);
    begin_ = 0;
    constexpr size_t kMostAtOnce = size_t{1} << 20;
    char piece[1 << 14];
    for (size_t total = 0; total < kMostAtOnce && sensible();) {
      const ssize_t count = ::recv(socket, piece, sizeof(piece), MSG_DONTWAIT);
      if (count > 0) {
        bytes_.append(piece, static_cast<size_t>(count));
        total += static_cast<size_t>(count);
      } else if (count == 0) {
        return false;
      } else if (errno != EINTR) {
        return errno == EAGAIN && sensible();
      }
    }
    return sensible();
  }
  std::optional<Frame> next() {
    if (left() < sizeof(uint32_t) || !sensible()) return std::nullopt;
    const size_t size = length();
    if (left() < sizeof(uint32_t) + size) return std::nullopt;
    Frame out{bytes_[begin_ + sizeof(uint32_t)],
              bytes_.substr(begin_ + sizeof(uint32_t) + 1, size - 1)};
    begin_ += sizeof(uint32_t) + size;
    return out;
  }

 private:
  size_t left() const { return bytes_.size() - begin_; }
  size_t length() const {
    uint32_t length = 0;
    std::memcpy(&length, bytes_.data() + begin_, sizeof(length));
    return length;
  }
  // Every frame has a type at least.
  bool sensible() const {
    return left() < sizeof(uint32_t) || (length() > 0 && length() <= longest_);
  }

  size_t longest_;
  std::string bytes_;
  size_t begin_ = 0;  // of what is left in bytes_
};

// A blocking send. False when the connection is closed.
bool send_frame(int socket, char type, std::string_view body = {}) {
  const std::string bytes = frame(type, body);
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t count = ::send(socket, bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    done += static_cast<size_t>(count);
  }
  return true;
}

void tune(int socket) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  const timeval limit{.tv_sec = 5, .tv_usec = 0};  // for a peer that no longer reads
  ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
}

std::string text_of(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address.ss_family == AF_INET) {
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(address).sin_addr, text,
                sizeof(text));
  } else {
    ::inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6&>(address).sin6_addr, text,
                sizeof(text));
  }
  const std::string_view view(text);
  constexpr std::string_view kMapped = "::ffff:";
  return std::string(view.starts_with(kMapped) ? view.substr(kMapped.size()) : view);
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

std::string seconds(milliseconds time) {
  return fmt::format("{:.3g} s", static_cast<double>(time.count()) / 1000.0);
}

// A socket of this machine that listens on the port, or -1.
int listen_on(int port) {
  for (const int family : {AF_INET6, AF_INET}) {
    const int socket = ::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (socket < 0) continue;
    const int on = 1, off = 0;
    ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    sockaddr_storage address{};
    socklen_t size = 0;
    if (family == AF_INET6) {
      ::setsockopt(socket, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
      auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
      v6.sin6_family = AF_INET6;
      v6.sin6_addr = in6addr_any;
      v6.sin6_port = htons(static_cast<uint16_t>(port));
      size = sizeof(v6);
    } else {
      auto& v4 = reinterpret_cast<sockaddr_in&>(address);
      v4.sin_family = AF_INET;
      v4.sin_port = htons(static_cast<uint16_t>(port));
      size = sizeof(v4);
    }
    if (::bind(socket, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
        ::listen(socket, SOMAXCONN) == 0) {
      return socket;
    }
    ::close(socket);
  }
  return -1;
}

// Waits until the socket can be read or `deadline`. False at the deadline.
bool readable(int socket, Clock::time_point deadline) {
  pollfd wanted{socket, POLLIN, 0};
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count();
  return ::poll(&wanted, 1, static_cast<int>(std::max<int64_t>(left, 0))) > 0;
}

std::optional<FrameReader::Frame> read_frame(int socket, FrameReader& reader,
                                             Clock::time_point deadline) {
  for (;;) {
    if (auto found = reader.next()) return found;
    if (!readable(socket, deadline) || !reader.fill(socket)) return reader.next();
  }
}

// Wakes a thread that polls.
class Wake {
 public:
  Wake() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}
  ~Wake() { ::close(event_); }
  Wake(const Wake&) = delete;
  Wake& operator=(const Wake&) = delete;
  int descriptor() const { return event_; }
  void call() const { ::eventfd_write(event_, 1); }

 private:
  int event_;
};

milliseconds sign_of_life_interval(milliseconds timeout) {
  return std::clamp(timeout / 16, milliseconds(50), milliseconds(5000));
}
milliseconds longest_silence(milliseconds timeout) { return timeout * 3 / 4; }

std::string silent_fault(int rank, milliseconds silence, int64_t step) {
  return fmt::format("rank {} has not answered for {} in step {}: stopped, or its machine is lost",
                     rank, seconds(silence), step);
}
std::string ended_fault(int rank, int64_t step) {
  return fmt::format("rank {} ended in step {}", rank, step);
}

}  // namespace

// Rank 0's side: one thread that serves all ranks.
class Rendezvous::Server {
 public:
  Server(const RankIdentity& identity, milliseconds timeout)
      : identity_(identity), timeout_(timeout), join_deadline_(Clock::now() + timeout) {
    if (identity.listener >= 0) {
      listener_ = ::fcntl(identity.listener, F_DUPFD_CLOEXEC, 0);
    } else {
      for (int i = 0; i < identity.ports && listener_ < 0; ++i) {
        listener_ = listen_on(identity.port + i);
      }
    }
    TWELL_REQUIRE(
        listener_ >= 0, "cannot listen on port {}{} of this machine: {}; set MASTER_PORT",
        identity.port,
        identity.ports > 1 ? fmt::format(" nor on the {} ports after it", identity.ports - 1) : "",
        std::strerror(errno));
    thread_ = std::thread([this] { serve(); });
  }

  ~Server() {
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, timeout_, [this] { return left_ == identity_.size || faulty_; });
      // The ranks that live are about to read the fault.
      if (faulty_) {
        changed_.wait_for(lock, milliseconds(1000), [this] { return left_ == identity_.size; });
      }
      stop_ = true;
    }
    wake_.call();
    thread_.join();
    for (const Connection& connection : connections_) {
      if (connection.socket >= 0) ::close(connection.socket);
    }
    ::close(listener_);
  }

  int port() const {
    sockaddr_storage address{};
    socklen_t size = sizeof(address);
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    return ntohs(
        reinterpret_cast<const sockaddr_in&>(address).sin_port);  // at the same place in v6
  }

 private:
  struct Connection {
    int socket = -1;
    int rank = -1;  // -1: not joined
    bool left = false;
    bool closed = false;
    std::string peer, local;  // addresses
    FrameReader reader{kLongestJoin};
    Clock::time_point since, last_seen;
    int64_t step = 0, calls = 0;
  };

  void serve() {
    const milliseconds interval = sign_of_life_interval(timeout_);
    Clock::time_point last_round = Clock::now();
    for (;;) {
      std::vector<pollfd> wanted = {{wake_.descriptor(), POLLIN, 0}, {listener_, POLLIN, 0}};
      for (const Connection& connection : connections_) {
        wanted.push_back({connection.closed ? -1 : connection.socket, POLLIN, 0});
      }
      ::poll(wanted.data(), wanted.size(), static_cast<int>(interval.count() / 2));
      {
        const std::lock_guard lock(mutex_);
        if (stop_) return;
      }
      const auto now = Clock::now();
      const bool paused = now - last_round > longest_silence(timeout_) / 2;
      last_round = now;
      auto events = wanted.begin() + 2;
      for (Connection& connection : connections_) {
        if (paused) connection.last_seen = now;
        if (events++->revents != 0) receive(connection);
      }
      if (wanted[1].revents != 0) accept_one();
      dismiss_strangers(now);
      watch(now);
    }
  }

  void accept_one() {
    sockaddr_storage peer{}, local{};
    socklen_t size = sizeof(peer);
    const int socket =
        ::accept4(listener_, reinterpret_cast<sockaddr*>(&peer), &size, SOCK_CLOEXEC);
    if (socket < 0) {
      // Too many open files, say: the connection waits, and this thread must not spin meanwhile.
      std::this_thread::sleep_for(milliseconds(10));
      return;
    }
    size = sizeof(local);
    ::getsockname(socket, reinterpret_cast<sockaddr*>(&local), &size);
    tune(socket);
    Connection& connection = connections_.emplace_back();
    connection.socket = socket;
    connection.peer = text_of(peer);
    connection.local = text_of(local);
    connection.last_seen = connection.since = Clock::now();
  }

  // Closes connections that were turned away, that do not say their rank, and the oldest of too
  // many, so that strangers take no files from the run.
  void dismiss_strangers(Clock::time_point now) {
    size_t strangers = 0;
    for (auto at = connections_.rbegin(); at != connections_.rend(); ++at) {
      if (at->rank >= 0) continue;
      if (++strangers > kMostStrangers || now - at->since > kJoinPatience) at->closed = true;
    }
    std::erase_if(connections_, [](const Connection& connection) {
      const bool dismissed = connection.rank < 0 && connection.closed;
      if (dismissed) ::close(connection.socket);
      return dismissed;
    });
  }

  void receive(Connection& connection) {
    const bool open = connection.reader.fill(connection.socket);
    connection.last_seen = Clock::now();
    while (const auto frame = connection.reader.next()) handle(connection, *frame);
    if (open || connection.closed) return;
    connection.closed = true;
    if (connection.rank < 0 || connection.left) return;
    leave(connection);
    declare(ended_fault(connection.rank, connection.step));
  }

  void handle(Connection& connection, const FrameReader::Frame& frame) {
    if (connection.rank < 0) {
      if (frame.type == kJoin) return join(connection, frame.body);
      connection.closed = true;
      return;
    }
    switch (frame.type) {
      case kPut: {
        auto [key, value] = split_two(frame.body);
        std::erase_if(waiting_, [&, wanted = std::string_view(key)](const Waiting& waiting) {
          if (waiting.key != wanted) return false;
          send_frame(waiting.rank->socket, kValue, frame.body);
          return true;
        });
        values_[key] = std::move(value);
        return;
      }
      case kGet: {
        const auto found = values_.find(frame.body);
        if (found == values_.end()) {
          waiting_.push_back({&connection, frame.body, Clock::now()});
        } else {
          send_frame(connection.socket, kValue, two(found->first, found->second));
        }
        return;
      }
      case kAlive:
        std::istringstream(frame.body) >> connection.step >> connection.calls;
        send_frame(connection.socket, kPong);
        return;
      case kFail:
        declare(fmt::format("rank {} failed in step {}: {}", connection.rank, connection.step,
                            frame.body));
        return;
      case kStuck: {
        std::istringstream text(frame.body);
        text >> connection.step >> connection.calls;
        std::string what;
        std::getline(text >> std::ws, what);
        // The rank that caused it may be noticed, or tell, a moment later.
        if (!stuck_) {
          stuck_ = {connection.rank, what,
                    Clock::now() + sign_of_life_interval(timeout_) + milliseconds(500)};
        }
        return;
      }
      case kBye:
        if (!connection.left) leave(connection);
        return;
      default:
        return;
    }
  }

  void join(Connection& connection, const std::string& body) {
    const auto [magic, rest] = split_two(body);
    const auto [job, numbers] = split_two(rest);
    int rank = -1, ranks = -1;
    std::istringstream(numbers) >> rank >> ranks;
    // Another job's rank looks for its own rank 0 on this port.
    if (!magic.starts_with(kAnyMagic) || job != identity_.job || rank < 0) {
      connection.closed = true;
      return;
    }
    std::string misfit;
    if (magic != kMagic) {
      misfit = fmt::format("rank {} runs another version of twell than rank 0", rank);
    } else if (ranks != identity_.size || rank >= identity_.size) {
      misfit = fmt::format(
          "rank {} was started as one of {} ranks, rank 0 as one of {}: start all with the same "
          "number",
          rank, ranks, identity_.size);
    }
    if (!misfit.empty()) {
      refuse(connection, misfit);
      if (joined_ < identity_.size) declare(misfit);  // a run that has begun goes on
      return;
    }
    const bool taken = std::any_of(connections_.begin(), connections_.end(),
                                   [&](const Connection& other) { return other.rank == rank; });
    if (taken) {
      return refuse(connection, fmt::format("two processes say that they are rank {} of {}", rank,
                                            identity_.size));
    }
    connection.rank = rank;
    connection.reader.allow(kLongestFrame);
    send_frame(connection.socket, kHello);
    if (!fault_.empty()) send_frame(connection.socket, kFail, fault_);
    if (++joined_ == identity_.size) welcome();
  }

  static void refuse(Connection& connection, const std::string& why) {
    send_frame(connection.socket, kRefused, why);
    connection.closed = true;
  }

  // A rank that reached rank 0 by the loopback interface is on rank 0's machine, whose address is
  // the one by which ranks of other machines reached it.
  void welcome() {
    std::string here = "127.0.0.1";
    for (const Connection& connection : connections_) {
      if (connection.rank >= 0 && !is_loopback(connection.local)) here = connection.local;
    }
    for (const Connection& connection : connections_) {
      if (connection.rank < 0) continue;
      send_frame(connection.socket, kWelcome,
                 is_loopback(connection.peer) ? here : connection.peer);
    }
  }

  void watch(Clock::time_point now) {
    if (joined_ < identity_.size) {
      if (now < join_deadline_) return;
      std::string missing;
      for (int rank = 0; rank < identity_.size; ++rank) {
        const bool here = std::any_of(connections_.begin(), connections_.end(),
                                      [rank](const Connection& c) { return c.rank == rank; });
        if (!here) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", rank);
      }
      return declare(fmt::format("of {} ranks, these did not start within {}: {}", identity_.size,
                                 seconds(timeout_), missing));
    }
    for (const Connection& connection : connections_) {
      if (connection.rank < 0 || connection.left || connection.closed) continue;
      const auto silence = std::chrono::duration_cast<milliseconds>(now - connection.last_seen);
      if (silence > longest_silence(timeout_)) {
        declare(silent_fault(connection.rank, silence, connection.step));
      }
    }
    // All ranks leave at the end of the run, when none waits for another.
    for (const Connection& connection : connections_) {
      for (const Waiting& waiting : waiting_) {
        if (!connection.left || now - waiting.since <= longest_silence(timeout_) ||
            now - connection.last_seen <= longest_silence(timeout_)) {
          continue;
        }
        declare(fmt::format("rank {} left in step {}, and rank {} still waits", connection.rank,
                            connection.step, waiting.rank->rank));
      }
    }
    if (stuck_ && now >= stuck_->until) blame(*std::exchange(stuck_, std::nullopt));
  }

  struct Stuck {
    int rank;
    std::string what;
    Clock::time_point until;
  };
  // A collective call failed: the rank that has entered the fewest such calls kept the others
  // waiting, so it is named.
  void blame(const Stuck& stuck) {
    const Connection *caller = nullptr, *last = nullptr;
    for (const Connection& connection : connections_) {
      if (connection.rank < 0) continue;
      if (connection.rank == stuck.rank) caller = &connection;
      if (last == nullptr || connection.calls < last->calls) last = &connection;
    }
    if (caller != nullptr && last->calls < caller->calls) {
      return declare(fmt::format("rank {} is behind the others in step {}: {} of rank {}",
                                 last->rank, last->step, stuck.what, stuck.rank));
    }
    declare(fmt::format("rank {} in step {}: {}", stuck.rank, caller == nullptr ? 0 : caller->step,
                        stuck.what));
  }

  void leave(Connection& connection) {
    connection.left = true;
    const std::lock_guard lock(mutex_);
    ++left_;
    changed_.notify_all();
  }

  void declare(const std::string& fault) {
    {
      const std::lock_guard lock(mutex_);
      if (faulty_) return;
      faulty_ = true;
      changed_.notify_all();
    }
    fault_ = fault;
    for (const Connection& connection : connections_) {
      if (connection.rank >= 0 && !connection.closed) send_frame(connection.socket, kFail, fault);
    }
  }

  const RankIdentity identity_;
  const milliseconds timeout_;
  const Clock::time_point join_deadline_;
  int listener_ = -1;
  Wake wake_;
  // Used by the thread alone.
  std::list<Connection> connections_;
  int joined_ = 0;
  std::map<std::string, std::string> values_;
  struct Waiting {
    const Connection* rank;
    std::string key;
    Clock::time_point since;
  };
  std::vector<Waiting> waiting_;
  std::optional<Stuck> stuck_;
  std::string fault_;
  // Shared.
  std::mutex mutex_;
  std::condition_variable changed_;
  int left_ = 0;
  bool faulty_ = false;
  bool stop_ = false;
  std::thread thread_;
};

// A rank's side.
class Rendezvous::Client {
 public:
  Client(const RankIdentity& identity, milliseconds timeout)
      : identity_(identity), timeout_(timeout) {
    const auto deadline = Clock::now() + timeout;
    connect(deadline);
    // Rank 0 tells who is missing at its own deadline, which may be a moment after ours.
    const auto answer = read_frame(socket_, reader_, deadline + milliseconds(5000));
    if (!answer || answer->type != kWelcome) {
      ::close(socket_);
      throw RankFault(answer ? answer->body : "rank 0 ended before all ranks had started");
    }
    address_ = answer->body;
    last_heard_ = Clock::now();
    thread_ = std::thread([this] { watch(); });
  }

  ~Client() { ::close(socket_); }

  // Ends the thread, whose functions called on a fault may still use the rendezvous. Once rank 0
  // has read the goodbyes it closes connections, which is no fault then.
  void leave() {
    stop_ = true;
    send(kBye);
    wake_.call();
    thread_.join();
  }

  const RankIdentity& identity() const { return identity_; }
  milliseconds timeout() const { return timeout_; }
  const std::string& address() const { return address_; }

  void put(std::string_view key, std::string_view value) { send(kPut, two(key, value)); }

  std::string get(const std::string& key) {
    send(kGet, key);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return values_.contains(key) || !fault_.empty(); });
    if (!values_.contains(key)) throw RankFault(fault_);
    std::string value = std::move(values_[key]);
    values_.erase(key);
    return value;
  }

  void set_step(int64_t step) {
    step_ = step;
    send(kAlive, progress());  // a fault in this step is named with it
  }
  void enter_call() { ++calls_; }

  void fail(std::string_view why) {
    {
      const std::lock_guard lock(mutex_);
      if (!fault_.empty()) return;
    }
    send(kAlive, progress());
    send(kFail, why);
  }
  std::string fault() const {
    const std::lock_guard lock(mutex_);
    return fault_;
  }

  void on_fault(const void* owner, std::function<void()> call) {
    const std::lock_guard calling(calling_);
    calls_on_fault_.erase(owner);
    if (!call) return;
    if (!fault().empty()) return call();
    calls_on_fault_[owner] = std::move(call);
  }

  [[noreturn]] void raise(std::string_view what) {
    send(kStuck, progress() + " " + std::string(what));
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, sign_of_life_interval(timeout_) + milliseconds(3000),
                      [this] { return !fault_.empty(); });
    if (!fault_.empty()) throw RankFault(fault_);
    throw RankFault(fmt::format("{} in step {}", what, step_.load()));
  }

 private:
  void connect(Clock::time_point deadline) {
    std::string reason = "no answer", others;  // ports
    for (int attempt = 0; Clock::now() < deadline;) {
      const int port = identity_.port + attempt % identity_.ports;
      bool answered = false;
      if (attempt % identity_.ports == 0) others.clear();
      socket_ = connect_once(port, answered, reason);
      if (socket_ >= 0) {
        send(kJoin,
             two(kMagic, two(identity_.job, fmt::format("{} {}", identity_.rank, identity_.size))));
        reader_ = FrameReader();
        const auto patience = std::min(deadline, Clock::now() + milliseconds(5000));
        const auto answer = read_frame(socket_, reader_, patience);
        if (answer && answer->type == kHello) return;
        ::close(socket_);
        TWELL_REQUIRE(!answer || answer->type != kRefused, "{}", answer->body);
        others += fmt::format("{}{}", others.empty() ? "" : ", ", port);
      }
      // Where nothing answers, a firewall may drop what is sent to all but the first ports, and
      // rank 0 may begin to listen on those: start again with them.
      attempt = answered ? attempt + 1 : 0;
      if (attempt % identity_.ports == 0) std::this_thread::sleep_for(milliseconds(50));
    }
    throw RankFault(fmt::format(
        "rank {} did not reach rank 0 at {}, port {}, within {}: {}{}", identity_.rank,
        identity_.host, identity_.port, seconds(timeout_), reason,
        others.empty() ? "" : fmt::format("; something else listens on port {}", others)));
  }

  // A connected socket, or -1 and the reason. `answered`: the host answered, even if by refusal.
  static int connect_to(const addrinfo& address, bool& answered, std::string& reason) {
    const int socket = ::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (socket < 0) return -1;
    int error = ::connect(socket, address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      pollfd wanted{socket, POLLOUT, 0};
      socklen_t size = sizeof(error);
      if (::poll(&wanted, 1, 2000) <= 0) {
        error = ETIMEDOUT;
      } else {
        ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size);
      }
    }
    answered = answered || error == 0 || error == ECONNREFUSED;
    if (error == 0) {
      ::fcntl(socket, F_SETFL, ::fcntl(socket, F_GETFL) & ~O_NONBLOCK);
      tune(socket);
      return socket;
    }
    reason = std::strerror(error);
    ::close(socket);
    return -1;
  }

  int connect_once(int port, bool& answered, std::string& reason) const {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    const std::string service = std::to_string(port);
    const int failed = ::getaddrinfo(identity_.host.c_str(), service.c_str(), &hints, &found);
    if (failed != 0) {
      reason = ::gai_strerror(failed);
      return -1;
    }
    int socket = -1;
    for (const addrinfo* one = found; one != nullptr && socket < 0; one = one->ai_next) {
      socket = connect_to(*one, answered, reason);
    }
    ::freeaddrinfo(found);
    return socket;
  }

  void send(char type, std::string_view body = {}) {
    const std::lock_guard lock(sending_);
    send_frame(socket_, type, body);  // a lost connection shows when it is read
  }
  std::string progress() const { return fmt::format("{} {}", step_.load(), calls_.load()); }

  void watch() {
    const milliseconds interval = sign_of_life_interval(timeout_);
    Clock::time_point last_round = Clock::now(), next_sign = last_round;
    while (!stop_) {
      if (Clock::now() >= next_sign) {
        send(kAlive, progress());
        next_sign = Clock::now() + interval;
      }
      pollfd wanted[] = {{socket_, POLLIN, 0}, {wake_.descriptor(), POLLIN, 0}};
      ::poll(wanted, 2, static_cast<int>(interval.count()));
      eventfd_t ignored = 0;
      ::eventfd_read(wake_.descriptor(), &ignored);
      const auto now = Clock::now();
      const milliseconds limit = longest_silence(timeout_);
      if (now - last_round > limit / 2) last_heard_ = now;  // this process was stopped
      last_round = now;
      if (wanted[0].revents != 0) {
        const bool open = reader_.fill(socket_);
        while (const auto frame = reader_.next()) handle(*frame);
        if (!open) {
          if (!stop_) set_fault(ended_fault(0, step_));
          return;
        }
      }
      const auto silence = std::chrono::duration_cast<milliseconds>(now - last_heard_);
      if (silence > limit) set_fault(silent_fault(0, silence, step_));
    }
  }

  void handle(const FrameReader::Frame& frame) {
    last_heard_ = Clock::now();
    if (frame.type == kFail) return set_fault(frame.body);
    if (frame.type != kValue) return;
    auto [key, value] = split_two(frame.body);
    const std::lock_guard lock(mutex_);
    values_[key] = std::move(value);
    changed_.notify_all();
  }

  void set_fault(const std::string& fault) {
    {
      const std::lock_guard lock(mutex_);
      if (!fault_.empty()) return;
      fault_ = fault;
      changed_.notify_all();
    }
    const std::lock_guard calling(calling_);
    for (const auto& [owner, call] : calls_on_fault_) call();
    calls_on_fault_.clear();
  }

  const RankIdentity identity_;
  const milliseconds timeout_;
  int socket_ = -1;
  std::string address_;
  FrameReader reader_;
  Wake wake_;
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> step_{0}, calls_{0};
  Clock::time_point last_heard_;
  std::mutex sending_;
  std::mutex calling_;  // of the functions, held while they run
  std::map<const void*, std::function<void()>> calls_on_fault_;
  mutable std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::string fault_;
  std::thread thread_;
};

Rendezvous::Rendezvous(const RankIdentity& identity, std::chrono::milliseconds timeout) {
  RankIdentity self = identity;
  if (identity.rank == 0) {
    server_ = std::make_unique<Server>(identity, timeout);
    // It is reached by the loopback interface, whatever the name of this machine resolves to.
    self.host = "127.0.0.1";
    self.port = server_->port();
    self.ports = 1;
  }
  client_ = std::make_unique<Client>(self, timeout);
}

Rendezvous::~Rendezvous() {
  client_->leave();
  client_.reset();
  server_.reset();
}

const RankIdentity& Rendezvous::identity() const { return client_->identity(); }
std::chrono::milliseconds Rendezvous::timeout() const { return client_->timeout(); }
const std::string& Rendezvous::address() const { return client_->address(); }
void Rendezvous::put(std::string_view key, std::string_view value) { client_->put(key, value); }
std::string Rendezvous::get(std::string_view key) { return client_->get(std::string(key)); }
std::string Rendezvous::agree(std::string_view mine) {
  const auto key = [number = agreements_++](int rank) {
    return fmt::format("agree/{}/{}", number, rank);
  };
  constexpr int kVerdict = -1;
  put(key(identity().rank), mine);
  if (identity().rank == 0) {
    std::string verdict;
    for (int rank = 0; rank < identity().size; ++rank) {
      const std::string text = get(key(rank));
      if (verdict.empty() && !text.empty()) verdict = fmt::format("rank {}: {}", rank, text);
    }
    put(key(kVerdict), verdict);
    return verdict;
  }
  return get(key(kVerdict));
}
void Rendezvous::set_step(int64_t step) { client_->set_step(step); }
void Rendezvous::enter_call() { client_->enter_call(); }
void Rendezvous::fail(std::string_view why) { client_->fail(why); }
std::string Rendezvous::fault() const { return client_->fault(); }
void Rendezvous::check() const {
  if (const std::string known = fault(); !known.empty()) throw RankFault(known);
}
void Rendezvous::on_fault(const void* owner, std::function<void()> call) {
  client_->on_fault(owner, std::move(call));
}
void Rendezvous::raise(std::string_view what) { client_->raise(what); }

}  // namespace twell
