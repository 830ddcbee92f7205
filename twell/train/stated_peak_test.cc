// SPDX-License-Identifier: Apache-2.0
#include "twell/train/stated_peak.h"

#include <gtest/gtest.h>

namespace twell {
namespace {

TEST(StatedPeak, KnowsVariantsOfAPartAndNothingElse) {
  EXPECT_DOUBLE_EQ(stated_peak_flops("NVIDIA H200"), 989.4e12);
  EXPECT_DOUBLE_EQ(stated_peak_flops("NVIDIA H200 NVL"), 835.5e12);
  EXPECT_DOUBLE_EQ(stated_peak_flops("NVIDIA H100 80GB HBM3"), 989.4e12);
  EXPECT_DOUBLE_EQ(stated_peak_flops("NVIDIA H100 PCIe"), 756e12);
  EXPECT_DOUBLE_EQ(stated_peak_flops("NVIDIA A100-SXM4-80GB"), 312e12);
  EXPECT_EQ(stated_peak_flops("NVIDIA GeForce RTX 3060"), 0.0);
  EXPECT_EQ(stated_peak_flops(""), 0.0);
}

}  // namespace
}  // namespace twell
