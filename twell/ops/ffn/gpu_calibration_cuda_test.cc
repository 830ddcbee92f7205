// SPDX-License-Identifier: Apache-2.0
// What is measured of the GPU beside what the costs of executions take it for.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/gpu/measure_device_cuda.h"
#include "twell/ops/ffn/ffn_cuda.h"
#include "twell/ops/ffn/gpu_report.h"

namespace twell {
namespace {

TEST(GpuCalibration, IsNearWhatCostsFollowFrom) {
  TWELL_GPU_TEST();
  DeviceFigures figures;
  TWELL_CUDA_CHECK(measure_device_cuda(stream.get(), figures));
  const GpuDevice device = gpu_device(ctx);
  // Other work on the GPU makes all of these slower.
  EXPECT_GT(figures.bandwidth, 0.1 * device.bandwidth);
  EXPECT_LT(figures.bandwidth, 1.1 * device.bandwidth);
  const double flops =
      device.mma_flops * static_cast<double>(device.multiprocessors) * device.clock_ghz * 1e3;
  EXPECT_GT(figures.mma_flops, 0.1 * flops);
  // A portable build takes a Hopper GPU for one of 8.0, whose tensor cores are 0.8 as fast.
  EXPECT_LT(figures.mma_flops, (kPortableBuild ? 1.4 : 1.1) * flops);
  EXPECT_GT(figures.launch_us, 0.2);
  EXPECT_LT(figures.launch_us, 100.0);
  EXPECT_EQ(gpu_calibration_lines(device, {.bandwidth = figures.bandwidth,
                                           .mma_flops = figures.mma_flops,
                                           .launch_us = figures.launch_us})
                .size(),
            4u);
}

}  // namespace
}  // namespace twell
