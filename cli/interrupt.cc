// SPDX-License-Identifier: Apache-2.0
#include "cli/interrupt.h"

#include <csignal>

namespace twell::cli {
namespace {

// A signal handler can reach nothing but a global; this is the program's only one.
std::atomic<bool> g_requested{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler may not take a lock");

void on_signal(int signal) {
  g_requested = true;
  std::signal(signal, SIG_DFL);  // the next one ends the process
}

}  // namespace

InterruptGuard::InterruptGuard() {
  g_requested = false;
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
}

InterruptGuard::~InterruptGuard() {
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
}

const std::atomic<bool>& InterruptGuard::requested() const { return g_requested; }

}  // namespace twell::cli
