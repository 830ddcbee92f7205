// SPDX-License-Identifier: Apache-2.0
// How many threads this process can keep running: the cores of its affinity mask, limited by the
// CPU quota of its control group.
#pragma once

#include <string>

namespace twell {

// The cores of the affinity mask or the quota rounded up, whichever is lower; at least 1.
int available_threads();

// The quota in cores (0.5 is half the time of one), the least of the process's control group and
// its ancestors; 0 when there is none. Paths that are read, relative to `root`:
//   proc/self/cgroup                                   the group, in version 1 of each controller
//   sys/fs/cgroup/GROUP/cpu.max                        "QUOTA PERIOD" or "max PERIOD" (version 2)
//   sys/fs/cgroup/cpu/GROUP/cpu.cfs_{quota,period}_us  microseconds, -1 for no quota (version 1)
double cgroup_cpu_quota(const std::string& root = "/");

// Threads for this many cores and this quota (0: none).
int threads_for(int cores, double quota);

}  // namespace twell
