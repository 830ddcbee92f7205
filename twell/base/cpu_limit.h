// SPDX-License-Identifier: Apache-2.0
// How many threads this process can keep running: the cores of its affinity mask, and no more than
// its control group's CPU quota pays for.
#pragma once

#include <string>

namespace twell {

// The cores of the affinity mask or the quota rounded up, whichever is less; at least 1.
int available_threads();

// The quota in cores (0.5 is half the time of one), the least of the process's control group and
// those above it; 0 when there is none. `root` stands before the paths that are read:
//   proc/self/cgroup           the group of each controller, or of version 2's single hierarchy
//   sys/fs/cgroup/GROUP/cpu.max                             version 2: "QUOTA PERIOD" or "max
//   PERIOD" sys/fs/cgroup/cpu/GROUP/cpu.cfs_{quota,period}_us       version 1: microseconds, -1 for
//   no quota
double cgroup_cpu_quota(const std::string& root = "/");

// Threads for so many cores and that quota (0: none).
int threads_for(int cores, double quota);

}  // namespace twell
