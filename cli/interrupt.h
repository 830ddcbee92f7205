// SPDX-License-Identifier: Apache-2.0
// SIGINT and SIGTERM as a request to finish what is under way: the first sets a flag, a second one
// ends the process at once.
#pragma once

#include <atomic>

namespace twell::cli {

// Handles the signals during its lifetime; one at a time.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  const std::atomic<bool>& requested() const;
};

}  // namespace twell::cli
