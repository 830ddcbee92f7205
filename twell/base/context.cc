// SPDX-License-Identifier: Apache-2.0
#include "twell/base/context.h"

#include <omp.h>
#include <sched.h>

#include <exception>
#include <vector>

#include "twell/base/error.h"

namespace twell {

int available_threads() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

Context::Context(int threads) : threads_(threads == 0 ? available_threads() : threads) {
  TWELL_REQUIRE(threads >= 0 && threads_ <= 4096, "threads must be between 1 and 4096, got {}",
                threads);
  // Sets this thread's own OpenMP team size, which oneDNN follows.
  omp_set_num_threads(threads_);
}

void Context::run_parallel(int64_t n, int64_t grain, RangeFn call, const void* fn) {
  if (n <= 0) return;
  const int64_t parts = std::clamp<int64_t>(n / std::max<int64_t>(grain, 1), 1, threads_);
  if (parts == 1) {
    call(fn, 0, n, 0);
    return;
  }
  std::vector<std::exception_ptr> errors(static_cast<size_t>(parts));
#pragma omp parallel num_threads(static_cast <int>(parts))
  {
    // A runtime may grant fewer threads than asked for; the parts stay the same.
    for (int64_t part = omp_get_thread_num(); part < parts; part += omp_get_num_threads()) {
      try {
        call(fn, n * part / parts, n * (part + 1) / parts, static_cast<int>(part));
      } catch (...) {
        errors[static_cast<size_t>(part)] = std::current_exception();
      }
    }
  }
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace twell
