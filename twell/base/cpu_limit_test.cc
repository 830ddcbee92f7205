// SPDX-License-Identifier: Apache-2.0
#include "twell/base/cpu_limit.h"

#include <gtest/gtest.h>
#include <sched.h>

#include "twell/base/test_folder.h"

namespace twell {
namespace {

double quota_below(const TempFolder& root) { return cgroup_cpu_quota(root.path().string()); }

TEST(CpuLimit, ThreadsForCoresAndQuota) {
  EXPECT_EQ(threads_for(8, 0.0), 8) << "no quota";
  EXPECT_EQ(threads_for(8, 2.0), 2);
  EXPECT_EQ(threads_for(8, 1.5), 2) << "what is left of a core is used too";
  EXPECT_EQ(threads_for(8, 0.1), 1);
  EXPECT_EQ(threads_for(2, 2.5), 2) << "more than the cores";
  EXPECT_EQ(threads_for(2, 1e9), 2);
  EXPECT_EQ(threads_for(0, 0.0), 1);
}

TEST(CpuLimit, NoControlGroups) {
  const TempFolder root;
  EXPECT_EQ(quota_below(root), 0.0);
  root.write("proc/self/cgroup", "nonsense\n\n::\n0::\n");
  EXPECT_EQ(quota_below(root), 0.0);
}

TEST(CpuLimit, Version2) {
  const TempFolder root;
  root.write("proc/self/cgroup", "0::/user/job\n");
  root.write("sys/fs/cgroup/user/job/cpu.max", "max 100000\n");
  EXPECT_EQ(quota_below(root), 0.0);
  root.write("sys/fs/cgroup/user/job/cpu.max", "350000 100000\n");
  EXPECT_DOUBLE_EQ(quota_below(root), 3.5);
  root.write("sys/fs/cgroup/user/cpu.max", "100000 50000\n");
  EXPECT_DOUBLE_EQ(quota_below(root), 2.0) << "a group above has less";
  root.write("sys/fs/cgroup/user/cpu.max", "broken");
  EXPECT_DOUBLE_EQ(quota_below(root), 3.5);
}

TEST(CpuLimit, Version2InAContainer) {
  const TempFolder root;
  root.write("proc/self/cgroup", "0::/docker/0123\n");
  root.write("sys/fs/cgroup/cpu.max", "50000 100000\n");
  EXPECT_DOUBLE_EQ(quota_below(root), 0.5) << "the container's group is mounted as the root";
  root.write("proc/self/cgroup", "0::/\n");
  EXPECT_DOUBLE_EQ(quota_below(root), 0.5);
}

TEST(CpuLimit, Version1) {
  const TempFolder root;
  root.write("proc/self/cgroup", "5:cpuset:/sets\n4:cpuacct,cpu:/job\n0::/\n");
  root.write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "-1\n");
  root.write("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(quota_below(root), 0.0);
  root.write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "400000\n");
  EXPECT_DOUBLE_EQ(quota_below(root), 4.0);
  root.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000\n");
  root.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_DOUBLE_EQ(quota_below(root), 1.5);
}

TEST(CpuLimit, AffinityIsHeeded) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  EXPECT_LE(available_threads(), CPU_COUNT(&before));
  CPU_ZERO(&one);
  for (int core = 0; core < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++core) {
    if (CPU_ISSET(core, &before)) CPU_SET(core, &one);
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(available_threads(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

}  // namespace
}  // namespace twell
