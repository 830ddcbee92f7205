// SPDX-License-Identifier: Apache-2.0
// Devices and what is chosen on them: Hopper, where the choices were measured, and cards that have
// run nothing yet.
#include "twell/ops/ffn/gpu_layer.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "twell/ops/ffn/registry.h"

namespace twell {
namespace {

constexpr GpuProperties kH200{.name = "NVIDIA H200",
                              .compute_capability = 90,
                              .multiprocessors = 132,
                              .clock_khz = 1980000,
                              .memory_clock_khz = 3201000,
                              .memory_bus_bits = 6144,
                              .shared_memory = 232448};
constexpr GpuProperties kH100{.name = "NVIDIA H100 80GB HBM3",
                              .compute_capability = 90,
                              .multiprocessors = 132,
                              .clock_khz = 1980000,
                              .memory_clock_khz = 2619000,
                              .memory_bus_bits = 5120,
                              .shared_memory = 232448};

// A letter for what auto runs: tokens from left to right, and in each group what was measured.
std::string choices(const GpuProperties& properties, int64_t width, int64_t ffn) {
  const GpuFfnLayer layer = gpu_ffn_layer(gpu_device_of(properties), {.width = width, .ffn = ffn});
  const std::vector<LayerActivity> activities = {
      {},
      {.nnz_per_token = 3.0, .union_share = 0.02},
      {.nnz_per_token = 15.0, .union_share = 0.12},
      {.nnz_per_token = 60.0, .union_share = 0.4, .largest_union = 0.5, .extra_tiles = 0.1},
      {.nnz_per_token = 200.0, .union_share = 0.7},
      {.nnz_per_token = 1000.0, .union_share = 0.95}};
  std::string letters;
  for (const int64_t tokens : {1, 4, 8, 16, 64, 65, 128, 512, 2048, 16384}) {
    if (!letters.empty()) letters += ' ';
    for (const LayerActivity& activity : activities) {
      const std::string_view name =
          choose_gpu_ffn(layer, {.tokens = tokens}, activity).execution->name;
      letters += name == "dense-rows"     ? 'r'
                 : name == "dense-batch"  ? 'b'
                 : name == "dense-gemms"  ? 'g'
                 : name == "decode-rows"  ? 'D'
                 : name == "row-stream"   ? 'R'
                 : name == "small-batch"  ? 'S'
                 : name == "medium-batch" ? 'M'
                 : name == "tile-union"   ? 'T'
                 : name == "row-fused"    ? 'F'
                                          : '?';
    }
  }
  return letters;
}

// Measurements on both GPUs agree with these choices, those of streams of rows on an H200 alone, so
// a change of the costs that changes one needs new measurements.
TEST(GpuDevices, OnHopperEveryChoiceIsTheMeasuredOne) {
  EXPECT_EQ(choices(kH200, 2048, 5632),
            "DRRRRR DDDRRR DDDDRR SSSSbb SSSbbb SMMggg SMMggg MMMggg MMTggg TTTTgg");
  EXPECT_EQ(choices(kH200, 4096, 11008),
            "DRRRRR DRRRRR DRRRRR SMMMMg SMMMgg SMMMgg SMMMgg MMMggg TTTTgg TTTTTg");
  EXPECT_EQ(choices(kH100, 2048, 5632),
            "DDDDRR DDDDRR DDDDRR SSSSSb SSSSbb SMMMgg SMMMgg MMMggg MMTggg TTTTgg");
  EXPECT_EQ(choices(kH100, 4096, 11008),
            "DDRRRR DDDRRR DDDRRR SMMMMg SMMMgg SMMMgg SMMMgg MMMggg TTTTgg TTTTTg");
}

TEST(GpuDevices, AnH200IsTheDefault) {
  const GpuDevice device = gpu_device_of(kH200), usual;
  EXPECT_NEAR(device.bandwidth / usual.bandwidth, 1.0, 1e-3);
  GpuDevice same = device;
  same.bandwidth = usual.bandwidth;
  EXPECT_EQ(same, usual);
  // Virtual machines that hide the clocks.
  GpuProperties hidden = kH200;
  hidden.clock_khz = hidden.memory_clock_khz = 0;
  EXPECT_EQ(gpu_device_of(hidden), usual);
}

struct Card {
  GpuProperties properties;
  double teraflops, gigabytes;  // of its data sheet: bf16 with f32 sums, without sparsity; memory
};
constexpr int64_t kAda = 101376;
const Card kCards[] = {
    {{"NVIDIA A100-SXM4-40GB", 80, 108, 1410000, 1215000, 5120, 166912}, 312.0, 1555.0},
    {{"NVIDIA RTX A6000", 86, 84, 1800000, 8001000, 384, kAda}, 154.8, 768.0},
    {{"NVIDIA L40S", 89, 142, 2520000, 9001000, 384, kAda}, 362.0, 864.0},
    {{"NVIDIA GeForce RTX 4090", 89, 128, 2520000, 10501000, 384, kAda}, 165.2, 1008.0},
    {{"NVIDIA GeForce RTX 5090", 120, 170, 2407000, 14001000, 512, kAda}, 209.5, 1792.0},
    {{"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 120, 188, 2617000, 14001000, 512, kAda},
     503.8,
     1792.0}};

TEST(GpuDevices, HaveTheRatesOfTheirDataSheets) {
  for (const auto& [properties, teraflops, gigabytes] : kCards) {
    const GpuDevice device = gpu_device_of(properties);
    const double rate =
        device.gemm_flops * static_cast<double>(device.multiprocessors) * device.clock_ghz * 1e-3;
    EXPECT_NEAR(rate / teraflops, 1.0, 0.02) << properties.name;
    EXPECT_NEAR(device.bandwidth / (1e3 * gigabytes), 1.0, 0.02) << properties.name;
    EXPECT_EQ(device.compute_capability, properties.compute_capability);
    EXPECT_EQ(device.shared_memory, properties.shared_memory);
  }
}

TEST(GpuDevices, ElsewhereAFewActiveNeuronsRunRowFusedAndManyDense) {
  for (const auto& [properties, teraflops, gigabytes] : kCards) {
    SCOPED_TRACE(properties.name);
    const GpuFfnLayer layer =
        gpu_ffn_layer(gpu_device_of(properties), {.width = 2048, .ffn = 5632});
    const auto choose = [&](int64_t tokens, double nnz) {
      return choose_gpu_ffn(layer, {.tokens = tokens}, {.nnz_per_token = nnz});
    };
    for (const int64_t tokens : {1024, 16384}) {
      EXPECT_EQ(choose(tokens, 3.0).execution->name, "row-fused") << tokens;
      EXPECT_EQ(choose(tokens, 600.0).execution->name, "dense-gemms") << tokens;
    }
    // Three products at some three quarters of the tensor cores' rate.
    const double dense = choose(16384, 600.0).dense_cost;
    const double peak = 3.0 * 2.0 * 16384 * 2048 * 5632 / (teraflops * 1e6);
    EXPECT_GT(dense, 1.15 * peak);
    EXPECT_LT(dense, 1.8 * peak);
    // One token reads every weight once, or the first one and the rows of active neurons.
    const double weights = 3.0 * 2.0 * 2048 * 5632 / (1e3 * gigabytes);
    EXPECT_GT(choose(1, 600.0).dense_cost, weights);
    EXPECT_LT(choose(1, 600.0).dense_cost, 1.3 * weights + 20.0);
  }
}

}  // namespace
}  // namespace twell
