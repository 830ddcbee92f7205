// SPDX-License-Identifier: Apache-2.0
// Any bytes from the other side of a rendezvous. The first byte chooses the side: a stranger that
// connects to rank 0, a rank that has joined it, or a rank 0 that answers rank 1. The run starts,
// or ends with an error, in bounded time and memory.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <thread>

#include "twell/base/error.h"
#include "twell/dist/rendezvous.h"
#include "twell/dist/test_ranks.h"

namespace twell {
namespace {

constexpr std::chrono::milliseconds kTimeout{
    200};  // less and rounds of 25 ms would count as pauses
constexpr std::string_view kJoin("\x1b\0\0\0Jtwell-ranks-2\0fuzz job\0001 2", 31);
constexpr std::string_view kHello("\1\0\0\0H", 5);

void send_all(int socket, std::string_view bytes) {
  ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

// Takes part as `rank` and uses what a run uses.
void take_part(int rank, const LocalListener& listener) {
  try {
    Rendezvous rendezvous(local_identity(rank, 2, listener, "fuzz job"), kTimeout);
    rendezvous.set_step(1);
    rendezvous.put("key", "value");
    rendezvous.get("key");
    rendezvous.agree("");
  } catch (const RankFault&) {
  } catch (const InputError&) {
  }
}

void talk_to_rank_zero(std::string_view bytes, bool joined) {
  const LocalListener listener;
  std::thread rank([&] { take_part(0, listener); });
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(listener.port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ::connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof(address));
  send_all(socket, joined ? std::string(kJoin).append(bytes) : bytes);
  ::shutdown(socket, SHUT_WR);
  rank.join();
  ::close(socket);
}

void answer_rank_one(std::string_view bytes) {
  const LocalListener listener;
  std::thread server([&] {
    const int socket = ::accept4(listener.socket, nullptr, nullptr, SOCK_CLOEXEC);
    send_all(socket, std::string(kHello).append(bytes));
    ::shutdown(socket, SHUT_WR);
    char piece[256];
    while (::recv(socket, piece, sizeof(piece), 0) > 0) {
    }
    ::close(socket);
  });
  take_part(1, listener);
  server.join();
}

}  // namespace
}  // namespace twell

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] % 3 == 2) {
    twell::answer_rank_one(bytes);
  } else {
    twell::talk_to_rank_zero(bytes, data[0] % 3 == 1);
  }
  return 0;
}
