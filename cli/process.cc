// SPDX-License-Identifier: Apache-2.0
#include "cli/process.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <system_error>
#ifdef __GLIBC__  // known once a header of the C library is read
#include <malloc.h>
#endif

#include "cli/options.h"
#include "twell/base/error.h"
#include "twell/train/metrics.h"

namespace twell::cli {
namespace {

// Signal handlers can only access globals.
std::atomic<bool> waits_for_command{false};
std::atomic<bool> stop_requested{false};
std::atomic<int> received{0};
std::atomic<int64_t> received_at{0};  // milliseconds
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int>::is_always_lock_free &&
              std::atomic<int64_t>::is_always_lock_free);

constexpr int64_t kOneRequest = 1000;  // milliseconds

void on_signal(int signal) {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  const int64_t now = int64_t{time.tv_sec} * 1000 + time.tv_nsec / 1'000'000;
  if (!waits_for_command || (stop_requested && now - received_at >= kOneRequest)) {
    ::_exit(128 + signal);
  }
  if (stop_requested) return;
  received = signal;
  received_at = now;
  stop_requested = true;
}

}  // namespace

int64_t memory_limit_bytes() {
  int64_t limit = int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGESIZE);
  for (const char* path :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    int64_t bytes = 0;
    if (std::ifstream(path) >> bytes) limit = std::min(limit, bytes);
  }
  return limit;
}

void require_memory(int64_t planned_bytes) {
  const int64_t limit = memory_limit_bytes();
  TWELL_REQUIRE(planned_bytes <= limit,
                "this run needs {} of memory, the machine has {}: take a smaller model, or fewer "
                "or shorter sequences at a time",
                format_bytes(static_cast<double>(planned_bytes)),
                format_bytes(static_cast<double>(limit)));
}

void return_freed_memory() {
#ifdef __GLIBC__
  ::malloc_trim(0);
#endif
}

void open_standard_descriptors() {
  // The lowest free number is taken, so descriptors below are open by then.
  for (const int number : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(number, F_GETFD) == -1) static_cast<void>(::open("/dev/null", O_RDWR));
  }
}

void handle_signals() {
  // Writing to a closed pipe, or beyond the limit of a file's size, then fails with EPIPE or EFBIG,
  // which a training run survives.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action {};
    if (::sigaction(signal, nullptr, &action) != 0 || action.sa_handler == SIG_IGN) continue;
    action = {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    ::sigaction(signal, &action, nullptr);
  }
}

const std::atomic<bool>& stop_on_signals() {
  waits_for_command = true;
  return stop_requested;
}

void check_interrupted() {
  if (stop_requested) throw Interrupted{};
}

bool forget_interrupt() {
  if (!stop_requested || received != SIGINT) return false;
  stop_requested = false;
  return true;
}

int interrupted_exit_code() { return 128 + (received == 0 ? SIGINT : received.load()); }

std::string read_standard_input() {
  std::string text;
  char piece[1 << 16];
  while (const size_t count = std::fread(piece, 1, sizeof(piece), stdin)) text.append(piece, count);
  TWELL_REQUIRE(std::ferror(stdin) == 0, "cannot read standard input: {}", std::strerror(errno));
  return text;
}

void write_out(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) {
    return;
  }
  throw std::system_error(errno, std::generic_category(), "cannot write to standard output");
}

int close_output(int code, int error) {
  errno = 0;
  const bool lost = std::fflush(stdout) != 0;
  if (error == 0) error = errno;
  if (!lost && std::ferror(stdout) == 0) return code;
  if (error != EPIPE) {
    print_error("twell: error: cannot write to standard output{}{}\n", error == 0 ? "" : ": ",
                error == 0 ? "" : std::strerror(error));
  }
  return code == kExitOk ? kExitFailure : code;
}

}  // namespace twell::cli
