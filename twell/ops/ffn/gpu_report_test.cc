// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/gpu_report.h"

#include <gtest/gtest.h>

#include <array>

namespace twell {
namespace {

constexpr std::array kRelease = {80, 86, 89, 90, 100, 120}, kDev = {90, 90, 90, 90, 90, 90};
using Lines = std::vector<std::string>;

GpuReport report(int capability, GpuCode code, std::span<const int> built, bool portable = false) {
  return {.compute_capability = capability, .code = code, .built = built, .portable = portable};
}

TEST(GpuReport, OfARelease) {
  EXPECT_EQ(
      gpu_report_lines(report(89, {.binary = 89, .ptx = 89}, kRelease)),
      (Lines{"kernels: native code for 8.9",
             "feed-forward layers: dense-gemms, portable-rows, portable-batch, portable-union, "
             "row-fused",
             "training: dense and hybrid. No GPU of this kind has run TwELL's tests yet"}));
  EXPECT_EQ(
      gpu_report_lines(report(90, {.binary = 90, .ptx = 90}, kRelease)),
      (Lines{"kernels: native code for 9.0",
             "feed-forward layers: dense-rows, dense-batch, dense-few-fp8, dense-gemms, "
             "decode-rows, row-stream, small-batch, small-batch-fp8, medium-batch, "
             "tile-union, screened; by name alone portable-rows, portable-batch, portable-union, "
             "row-fused",
             "training: dense and hybrid"}));
}

// Hopper's kernels do not run on later GPUs.
TEST(GpuReport, LeavesHoppersExecutionsToHopper) {
  for (const int capability : {80, 86, 89, 100, 103, 120, 121}) {
    EXPECT_EQ(
        gpu_executions(report(capability, {.binary = capability, .ptx = 80}, kRelease)),
        (Lines{"dense-gemms", "portable-rows", "portable-batch", "portable-union", "row-fused"}))
        << capability;
  }
}

TEST(GpuReport, OfABuildWithoutMachineCodeForTheGpu) {
  EXPECT_EQ(gpu_report_lines(report(120, {.binary = 120, .ptx = 80}, kDev)).front(),
            "kernels: PTX for 8.0, which the driver compiles for 12.0");
  EXPECT_EQ(gpu_report_lines(report(75, {}, kDev)),
            Lines{"kernels: none; they need compute capability 8.0 or later"});
}

TEST(GpuReport, OfAPortableBuild) {
  const GpuReport hopper = report(90, {.binary = 90, .ptx = 80}, kDev, /*portable=*/true);
  EXPECT_EQ(gpu_machine_code(hopper),
            "native code for 9.0, made of PTX for 8.0; a portable build, which takes it for 8.0");
  EXPECT_EQ(gpu_auto_executions(hopper), (Lines{"dense-gemms", "portable-rows", "portable-batch",
                                                "portable-union", "row-fused"}));
}

// Figures of no GPU: a memory of 2 TB/s and 100 SMs of 1,000 operations at 1.5 GHz.
TEST(GpuReport, SaysWhetherCostsHold) {
  const GpuDevice device{.compute_capability = 80,
                         .multiprocessors = 100,
                         .clock_ghz = 1.5,
                         .bandwidth = 2e6,
                         .mma_flops = 1000.0};
  const GpuFigures good{.bandwidth = 1.8e6, .mma_flops = 1.35e8, .launch_us = 2.25};
  EXPECT_EQ(gpu_calibration_lines(device, good),
            (Lines{"device memory: 1800 GB/s read, costs take it for 2000 (0.90)",
                   "tensor cores by mma.sync: 135 TFLOP/s in bf16, costs take them for 150 (0.90)",
                   "launches: 2.2 us from kernel to kernel",
                   "the costs of executions hold on this GPU"}));
  const auto holds = [&](double bandwidth, double flops) {
    const Lines lines = gpu_calibration_lines(
        device, {.bandwidth = bandwidth, .mma_flops = flops, .launch_us = 2.0});
    return lines.back() == "the costs of executions hold on this GPU";
  };
  EXPECT_TRUE(holds(1.61e6, 1.14e8));
  EXPECT_FALSE(holds(1.59e6, 1.14e8));
  EXPECT_FALSE(holds(1.61e6, 1.12e8));
  EXPECT_FALSE(holds(2.3e6, 1.35e8));
  EXPECT_FALSE(holds(1.8e6, 1.7e8));
}

}  // namespace
}  // namespace twell
