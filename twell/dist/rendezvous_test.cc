// SPDX-License-Identifier: Apache-2.0
// Connections to rank 0 that are no ranks of the run: port scanners, and ranks of other jobs.
#include "twell/dist/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "twell/dist/rank_identity.h"
#include "twell/dist/test_ranks.h"

namespace twell {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using namespace std::string_view_literals;

sockaddr_in loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// A connection of this test to a port of this machine. Reading it ends after 15 s.
class Stranger {
 public:
  explicit Stranger(int port) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const sockaddr_in address = loopback(port);
    EXPECT_EQ(::connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    const timeval limit{.tv_sec = 15, .tv_usec = 0};
    ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    ::setsockopt(socket_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  }
  ~Stranger() { ::close(socket_); }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;

  bool send(std::string_view bytes) {
    return ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL) == std::ssize(bytes);
  }
  bool is_closed() {
    char byte;
    return ::recv(socket_, &byte, 1, 0) == 0 || errno == ECONNRESET;
  }

 private:
  int socket_;
};

int64_t open_files() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

// Rank 0 of two, waiting for rank 1. After join() the run has begun and is over.
class WaitingRun : public testing::Test {
 protected:
  WaitingRun() : zero_([this] { take_part(0); }) {}
  ~WaitingRun() override {
    if (zero_.joinable()) join();
  }
  void take_part(int rank) {
    Rendezvous rendezvous(local_identity(rank, 2, listener_, "this"), seconds(60));
    rendezvous.put("from " + std::to_string(rank), "value");
    EXPECT_EQ(rendezvous.get("from " + std::to_string(1 - rank)), "value");
  }
  void join() {
    take_part(1);
    zero_.join();
  }

  LocalListener listener_;
  std::thread zero_;
};

TEST_F(WaitingRun, RanksOfAnotherJobTakeNoFilesFromTheRun) {
  { Stranger first(listener_.port); }
  std::this_thread::sleep_for(milliseconds(100));
  const int64_t before = open_files();
  for (int i = 0; i < 300; ++i) {
    Stranger stranger(listener_.port);
    ASSERT_TRUE(stranger.send("\x18\0\0\0Jtwell-ranks-2\0other\0001 2"sv));
    ASSERT_TRUE(stranger.is_closed());
  }
  EXPECT_LE(open_files(), before + 5);
  join();
}

TEST_F(WaitingRun, SilentStrangersAreDismissed) {
  Stranger stranger(listener_.port);
  EXPECT_TRUE(stranger.is_closed());
}

TEST_F(WaitingRun, NonsenseEndsAConnectionAtOnce) {
  for (const std::string_view nonsense :
       {"\0\0\0\0\0\0\0\0"sv, "\xff\xff\xff\xff"sv, "GET / HTTP/1.1\r\n\r\n"sv,
        "\xff\xff\xff\x03Jxxxx"sv, "\2\0\0\0P "sv}) {
    const auto start = std::chrono::steady_clock::now();
    Stranger stranger(listener_.port);
    ASSERT_TRUE(stranger.send(nonsense));
    EXPECT_TRUE(stranger.is_closed());
    EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(3));
  }
}

TEST(Rendezvous, ARankThatJoinsAfterAFaultIsTold) {
  const LocalListener listener;
  RankIdentity identity;
  identity.size = identity.local_size = 2;
  identity.host = "127.0.0.1";
  identity.port = listener.port;
  identity.listener = listener.socket;
  // Rank 1 joins and ends before rank 0's own connection.
  { Stranger(listener.port).send("\x13\0\0\0Jtwell-ranks-2\0\0001 2"sv); }
  const auto start = std::chrono::steady_clock::now();
  try {
    Rendezvous rendezvous(identity, seconds(20));
    rendezvous.get("missing");
    FAIL() << "rank 1 is not there";
  } catch (const RankFault& fault) {
    EXPECT_STREQ(fault.what(), "rank 1 ended in step 0");
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(10));
}

// What rank 0 of two says when a rank with this frame joins.
std::string misfit(std::string_view join) {
  const LocalListener listener;
  Stranger rank(listener.port);
  EXPECT_TRUE(rank.send(join));
  const auto start = std::chrono::steady_clock::now();
  std::string what;
  try {
    Rendezvous rendezvous(local_identity(0, 2, listener, "this"), seconds(20));
    rendezvous.get("missing");
  } catch (const RankFault& fault) {
    what = fault.what();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(10));
  return what;
}

TEST(Rendezvous, ARankThatDoesNotFitIsNamedAtOnce) {
  EXPECT_EQ(misfit("\x17\0\0\0Jtwell-ranks-2\0this\0002 3"sv),
            "rank 2 was started as one of 3 ranks, rank 0 as one of 2: start all with the same "
            "number");
  EXPECT_EQ(misfit("\x15\0\0\0Jtwell-ranks-1\0this\0001"sv),
            "rank 1 runs another version of twell than rank 0");
}

// The rank itself is told, before it waits for anything.
TEST(Rendezvous, ARankOfAnotherNumberOfRanksIsToldSo) {
  const LocalListener listener;
  std::thread zero(
      [&] { EXPECT_THROW(Rendezvous(local_identity(0, 2, listener), seconds(20)), RankFault); });
  try {
    Rendezvous rendezvous(local_identity(1, 4, listener), seconds(20));
    ADD_FAILURE() << "joined";
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("rank 1 was started as one of 4 ranks"));
  }
  zero.join();
}

// A port of this machine that answers no connection, like one behind a firewall: its queue is full.
class SilentPort {
 public:
  explicit SilentPort(int port) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const sockaddr_in address = loopback(port);
    works_ = ::bind(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
             ::listen(socket_, 0) == 0;
    if (works_) waiting_.emplace(port);
  }
  ~SilentPort() { ::close(socket_); }
  SilentPort(const SilentPort&) = delete;
  SilentPort& operator=(const SilentPort&) = delete;
  bool works() const { return works_; }

 private:
  int socket_;
  bool works_ = false;
  std::optional<Stranger> waiting_;
};

TEST(Rendezvous, RankZeroMayComeLateToTheOnlyPortThatIsOpen) {
  std::optional<SilentPort> second;
  int port = 0;
  for (int i = 0; i < 100 && !(second && second->works()); ++i) {
    port = LocalListener().port;
    second.emplace(port + 1);
  }
  ASSERT_TRUE(second->works());
  const auto take_part = [port](int rank) {
    RankIdentity identity;
    identity.rank = rank;
    identity.size = identity.local_size = 2;
    identity.host = "127.0.0.1";
    identity.port = port;
    identity.ports = 2;
    Rendezvous rendezvous(identity, seconds(15));
    EXPECT_EQ(rendezvous.agree({}), "");
  };
  std::thread one([&] { EXPECT_NO_THROW(take_part(1)); });
  std::this_thread::sleep_for(milliseconds(200));
  EXPECT_NO_THROW(take_part(0));
  one.join();
}

TEST(Rendezvous, ARankThatLeavesWhileOthersWaitIsAFault) {
  const auto errors = run_rendezvous(
      2,
      [](Rendezvous& rendezvous) {
        if (rendezvous.identity().rank == 0) rendezvous.get("missing");
      },
      milliseconds(2000));
  EXPECT_EQ(errors[0], "rank 1 left in step 0, and rank 0 still waits");
}

}  // namespace
}  // namespace twell
