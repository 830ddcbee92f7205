// SPDX-License-Identifier: Apache-2.0
// A client of an HTTP server for tests: raw bytes there and back.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>

#include "twell/base/error.h"

namespace twell {

class TestClient {
 public:
  explicit TestClient(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int fault = EINTR; fault != 0;) {  // libFuzzer's timer interrupts system calls
      socket_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      const bool connected =
          ::connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
      fault = connected ? 0 : errno;
      TWELL_CHECK(fault == 0 || fault == EINTR, "cannot connect: {}", std::strerror(fault));
      if (fault != 0) ::close(socket_);
    }
    const timeval limit{.tv_sec = 30, .tv_usec = 0};
    ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  }
  ~TestClient() { ::close(socket_); }
  TestClient(const TestClient&) = delete;
  TestClient& operator=(const TestClient&) = delete;

  void send(std::string_view bytes) const {
    ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  void end() const { ::shutdown(socket_, SHUT_WR); }
  // What comes next, at most so many bytes; empty at the end of the connection.
  std::string receive(size_t most = 4096) const {
    std::string piece(most, '\0');
    ssize_t count = -1;
    do {
      count = ::recv(socket_, piece.data(), piece.size(), 0);
    } while (count < 0 && errno == EINTR);
    TWELL_CHECK(count >= 0 || errno != EAGAIN, "the connection does not end");
    piece.resize(static_cast<size_t>(std::max<ssize_t>(count, 0)));
    return piece;
  }
  std::string receive_all() const {
    std::string all;
    for (std::string piece; !(piece = receive()).empty();) all += piece;
    return all;
  }
  // Receives until what has come ends with this text.
  std::string receive_until(std::string_view end) const {
    std::string all;
    while (!all.ends_with(end)) {
      const std::string piece = receive();
      if (piece.empty()) break;
      all += piece;
    }
    return all;
  }

 private:
  int socket_ = -1;
};

// Sends the bytes, ends, and returns all that comes back.
inline std::string talk(int port, std::string_view bytes) {
  const TestClient client(port);
  client.send(bytes);
  client.end();
  return client.receive_all();
}

}  // namespace twell
