// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn_train/choice.h"

#include <gtest/gtest.h>

namespace twell {
namespace {

const GpuFfnLayer kTrained{.width = 2048, .ffn = 5632};

TEST(GpuFfnTrain, HasAnAnswerForEverySize) {
  for (const int64_t width : {8, 2048, 32768, 131072, 131080}) {
    for (const int64_t ffn : {8, 524288, 524296, 1048576}) {
      const GpuFfnLayer layer{.width = width, .ffn = ffn};
      const bool takes = ffn <= 524288 && width <= 131072 && width * ffn < int64_t{1} << 35;
      EXPECT_EQ(gpu_ffn_train_unsupported(FfnTrainExecution::kHybrid, layer).empty(), takes);
      EXPECT_EQ(choose_gpu_ffn_train(layer, 1000000, FfnTrainPolicy::kHybrid, {}),
                takes ? FfnTrainExecution::kHybrid : FfnTrainExecution::kDense);
    }
  }
}

TEST(GpuFfnTrain, FollowsTheActivity) {
  const auto choose = [](int64_t tokens, double nnz, double union_neurons = -1.0) {
    const LayerActivity activity{
        .nnz_per_token = nnz, .union_share = union_neurons < 0.0 ? -1.0 : union_neurons / 5632.0};
    return choose_gpu_ffn_train(kTrained, tokens, FfnTrainPolicy::kAuto, activity);
  };
  constexpr auto kDense = FfnTrainExecution::kDense, kHybrid = FfnTrainExecution::kHybrid;
  EXPECT_EQ(choose(16384, -1.0), kDense);
  EXPECT_EQ(choose(16384, 0.0), kHybrid);
  EXPECT_EQ(choose(16384, 15.0), kHybrid);
  EXPECT_EQ(choose(65536, 15.0), kHybrid);
  EXPECT_EQ(choose(16384, 100.0), kDense);
  EXPECT_EQ(choose(16384, 100.0, 2000.0), kHybrid);
  EXPECT_EQ(choose(16384, 2800.0), kDense);
  EXPECT_EQ(choose(16384, 150.0, 2900.0), kHybrid);
  EXPECT_EQ(choose(16384, 713.0, 1718.0), kHybrid);  // few tokens have all neurons active
  EXPECT_EQ(choose(16384, 56.0, 4065.0), kDense);
  EXPECT_EQ(choose(2048, 39.0, 3327.0), kDense);
  EXPECT_EQ(choose(128, 15.0), kDense);  // launches take longer than the GEMMs
}

// An A100: tensor cores and memory a third as fast, products by mma.sync as fast as dense ones.
TEST(GpuFfnTrain, FollowsTheDevice) {
  GpuFfnLayer layer = kTrained;
  layer.device = {.compute_capability = 80,
                  .multiprocessors = 108,
                  .clock_ghz = 1.41,
                  .bandwidth = 1.555e6,
                  .mma_flops = 2048.0,
                  .gemm_flops = 2048.0};
  const auto choose = [&](double nnz, double union_neurons) {
    return choose_gpu_ffn_train(layer, 16384, FfnTrainPolicy::kAuto,
                                {.nnz_per_token = nnz, .union_share = union_neurons / 5632.0});
  };
  constexpr auto kDense = FfnTrainExecution::kDense, kHybrid = FfnTrainExecution::kHybrid;
  EXPECT_EQ(choose(15.0, 700.0), kHybrid);
  EXPECT_EQ(choose(100.0, 3000.0), kHybrid);
  EXPECT_EQ(choose(100.0, 5400.0), kDense);
  EXPECT_EQ(choose(2800.0, 5632.0), kDense);
  // Twice as fast dense products, as those of GPUs whose dense GEMMs are not by mma.sync.
  layer.device.gemm_flops = 4096.0;
  EXPECT_EQ(choose(15.0, 700.0), kHybrid);
  EXPECT_EQ(choose(100.0, 3000.0), kDense);
}

// Every policy on every kind of device and layer, written out without the table's rows.
TEST(GpuFfnTrain, EveryCall) {
  struct Layer {
    int64_t width, ffn;
    Activation activation;
    bool hybrid;  // where the GPU is a Hopper; on others F is at most 131,072
  };
  const Layer layers[] = {
      {2048, 5632, Activation::kRelu, true},    {2048, 5632, Activation::kSilu, false},
      {2048, 5632, Activation::kRelu2, true},   {8, 8, Activation::kRelu, true},
      {8, 524288, Activation::kRelu, true},     {8, 524296, Activation::kRelu, false},
      {65536, 524280, Activation::kRelu, true}, {65536, 524288, Activation::kRelu, false}};
  const LayerActivity unknown, active{.nnz_per_token = 0.0, .union_share = 0.0};
  for (const int capability : {80, 89, 90, 100}) {
    for (const Layer& l : layers) {
      const GpuFfnLayer layer{.width = l.width,
                              .ffn = l.ffn,
                              .activation = l.activation,
                              .device = {.compute_capability = capability}};
      const bool portable = l.hybrid && l.ffn <= 131072;
      const bool hybrid = capability == 90 ? l.hybrid : portable;
      EXPECT_TRUE(gpu_ffn_train_unsupported(FfnTrainExecution::kDense, layer).empty());
      EXPECT_EQ(gpu_ffn_train_unsupported(FfnTrainExecution::kHybrid, layer).empty(), hybrid);
      EXPECT_EQ(gpu_ffn_train_unsupported(FfnTrainExecution::kHybrid, layer, true).empty(),
                portable);
      const auto choose = [&](FfnTrainPolicy policy, const LayerActivity& activity) {
        return choose_gpu_ffn_train(layer, int64_t{1} << 20, policy, activity);
      };
      constexpr auto kDense = FfnTrainExecution::kDense;
      const auto best = hybrid ? FfnTrainExecution::kHybrid : kDense;
      for (const LayerActivity& activity : {unknown, active}) {
        EXPECT_EQ(choose(FfnTrainPolicy::kDense, activity), kDense);
        EXPECT_EQ(choose(FfnTrainPolicy::kHybrid, activity), best);
      }
      EXPECT_EQ(choose(FfnTrainPolicy::kAuto, unknown), kDense);
      if (layer.ffn > 8) {
        EXPECT_EQ(choose(FfnTrainPolicy::kAuto, active), best);
      }
    }
  }
}

}  // namespace
}  // namespace twell
