// SPDX-License-Identifier: Apache-2.0
#include "twell/base/gpu_code.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

namespace twell {
namespace {

constexpr std::array kRelease = {80, 86, 89, 90, 100, 120};

TEST(GpuCode, IsThatOfTheSameMajorNumberAndTheNextMinorOne) {
  struct Case {
    int capability, code;
  };
  for (const auto& [capability, code] :
       {Case{75, 0}, Case{80, 80}, Case{86, 86}, Case{87, 86}, Case{89, 89}, Case{90, 90},
        Case{100, 100}, Case{103, 100}, Case{110, 0}, Case{120, 120}, Case{121, 120}}) {
    EXPECT_EQ(native_code(capability, kRelease), code) << capability;
  }
  EXPECT_EQ(native_code(89, std::array{90, 80}), 80);
  EXPECT_EQ(native_code(120, std::array{80, 90}), 0);
  EXPECT_EQ(native_code(120, std::array{121}), 0) << "code for a later minor number";
}

// Regression: kernels from the PTX of 8.0 were launched on 10.0 and 12.0 as if they waited for the
// kernel in front, so that they could read what it had not written yet.
TEST(GpuCode, LaunchesDependentsOnlyWhereTheKernelsWait) {
  const std::vector<int> dev = {800, 900}, release = {800, 860, 890, 900, 1000, 1200},
                         portable = {800}, hopper = {900}, later = {800, 1210};
  EXPECT_TRUE(has_dependent_launch(90, dev));
  EXPECT_TRUE(has_dependent_launch(90, hopper));
  for (const int capability : {80, 86, 89, 100, 110, 120}) {
    EXPECT_FALSE(has_dependent_launch(capability, dev)) << capability;
    EXPECT_FALSE(has_dependent_launch(capability, hopper)) << capability;
  }
  for (const int capability : {90, 100, 103, 120, 121}) {
    EXPECT_TRUE(has_dependent_launch(capability, release)) << capability;
  }
  for (const int capability : {80, 86, 89, 110}) {
    EXPECT_FALSE(has_dependent_launch(capability, release)) << capability;
  }
  EXPECT_FALSE(has_dependent_launch(90, portable)) << "assembled for 9.0 from PTX of 8.0";
  EXPECT_FALSE(has_dependent_launch(120, later));
  EXPECT_TRUE(has_dependent_launch(121, later));
}

TEST(GpuCode, OfAPortableBuildTakesEveryGpuForAnAmpereOfLeastSharedMemory) {
  EXPECT_EQ(seen_capability(90, /*portable=*/true), 80);
  EXPECT_EQ(seen_capability(120, true), 80);
  EXPECT_EQ(seen_capability(75, true), 75);
  EXPECT_EQ(seen_shared_memory(232448, true), 101376);
  EXPECT_EQ(seen_shared_memory(65536, true), 65536);
  EXPECT_EQ(seen_capability(90, /*portable=*/false), 90);
  EXPECT_EQ(seen_shared_memory(232448, false), 232448);
}

TEST(GpuCode, SaysWhatRuns) {
  EXPECT_EQ(gpu_code_text({.binary = 86, .ptx = 86}, kRelease), "native code for 8.6");
  EXPECT_EQ(gpu_code_text({.binary = 90, .ptx = 80}, kRelease),
            "native code for 9.0, made of PTX for 8.0");
  EXPECT_EQ(gpu_code_text({.binary = 120, .ptx = 80}, std::array{80, 90}),
            "PTX for 8.0, which the driver compiles for 12.0");
  // The driver compiles for 8.0 what a build for 9.0 has as PTX alone.
  EXPECT_EQ(gpu_code_text({.binary = 80, .ptx = 80}, std::array{90}),
            "PTX for 8.0, which the driver compiles for 8.0");
}

}  // namespace
}  // namespace twell
