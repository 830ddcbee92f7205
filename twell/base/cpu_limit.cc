// SPDX-License-Identifier: Apache-2.0
#include "twell/base/cpu_limit.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

namespace twell {
namespace {

namespace fs = std::filesystem;

// CPU_COUNT of a mask that is large enough for this machine; 1 if the system does not report one.
int affinity_cores() {
  constexpr size_t kMaxCores = 1 << 16;
  for (size_t cores = CPU_SETSIZE; cores <= kMaxCores; cores *= 2) {
    std::vector<cpu_set_t> mask(cores / CPU_SETSIZE);
    const size_t bytes = mask.size() * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, mask.data()) == 0) return CPU_COUNT_S(bytes, mask.data());
  }
  return 1;
}

double number(const std::string& text) {
  std::istringstream in(text);
  double value = 0.0;
  return in >> value ? value : 0.0;
}

std::string first_line(const fs::path& file) {
  std::string line;
  std::ifstream in(file);
  std::getline(in, line);
  return line;
}

// The quota of one group, 0 if it has none.
double quota_of(const fs::path& group, bool version2) {
  double quota = 0.0, period = 0.0;
  if (version2) {
    const std::string line = first_line(group / "cpu.max");
    quota = number(line);  // "max" is not a number
    period = number(line.substr(std::min(line.find(' '), line.size())));
  } else {
    quota = number(first_line(group / "cpu.cfs_quota_us"));
    period = number(first_line(group / "cpu.cfs_period_us"));
  }
  return quota > 0.0 && period > 0.0 ? quota / period : 0.0;
}

// The least quota of a group and its ancestors. In a container the group's name may be that of the
// host while only the container's own groups are mounted; missing folders are skipped.
double least_quota(const fs::path& mount, const std::string& group, bool version2) {
  double least = 0.0;
  for (fs::path path = fs::path(group).relative_path();; path = path.parent_path()) {
    const double quota = quota_of(mount / path, version2);
    if (quota > 0.0) least = least == 0.0 ? quota : std::min(least, quota);
    if (path.empty()) return least;
  }
}

}  // namespace

double cgroup_cpu_quota(const std::string& root) {
  const fs::path mount = fs::path(root) / "sys/fs/cgroup";
  std::ifstream groups(fs::path(root) / "proc/self/cgroup");
  double least = 0.0;
  for (std::string line; std::getline(groups, line);) {
    // "0::/group" of version 2, "4:cpu,cpuacct:/group" of version 1
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool version2 = controllers.empty();
    if (!version2 && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    const double quota =
        least_quota(version2 ? mount : mount / "cpu", line.substr(second + 1), version2);
    if (quota > 0.0) least = least == 0.0 ? quota : std::min(least, quota);
  }
  return least;
}

int threads_for(int cores, double quota) {
  const int most = std::max(1, cores);
  if (quota <= 0.0 || quota >= most) return most;
  return static_cast<int>(std::ceil(quota));
}

int available_threads() { return threads_for(affinity_cores(), cgroup_cpu_quota()); }

}  // namespace twell
