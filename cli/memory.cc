// SPDX-License-Identifier: Apache-2.0
#include "cli/memory.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#ifdef __GLIBC__  // known once a header of the C library is read
#include <malloc.h>
#endif

#include "twell/base/error.h"
#include "twell/train/metrics.h"

namespace twell::cli {

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

}  // namespace twell::cli
