// SPDX-License-Identifier: Apache-2.0
// The tests that an execution needs: its row, its cost, and its launch against dense.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "tests/first_kernel/naive_ffn_cuda.h"
#include "twell/base/cuda_gtest.h"
#include "twell/ops/ffn/ffn_cuda.h"

namespace twell::first_kernel {
namespace {

TEST(FirstKernel, TakesWhatItsRowSays) {
  const GpuFfnExecution row = naive_execution();
  GpuFfnLayer layer{.width = 2048, .ffn = 5632};
  for (const int64_t tokens : {1, 8, 9, 100000}) {
    EXPECT_EQ(gpu_ffn_unsupported(row, layer, {.tokens = tokens}), "");
  }
  EXPECT_NE(gpu_ffn_unsupported(row, layer, {.tokens = 1, .norm = true}), "");
  EXPECT_NE(gpu_ffn_unsupported(row, layer, {.tokens = 1, .counts_rows = true}), "");
  layer.activation = Activation::kRelu2;
  EXPECT_EQ(gpu_ffn_unsupported(row, layer, {.tokens = 1}), "it does not compute relu2");
  layer = {.width = 2048, .ffn = 8200};
  EXPECT_EQ(gpu_ffn_unsupported(row, layer, {.tokens = 1}),
            "width 2048 and FFN size 8200 are too large for it");
  EXPECT_EQ(find_gpu_ffn(row.name), nullptr) << "an example is no execution of the engine";
}

TEST(FirstKernel, CostsMoreForMoreTokensAndNeurons) {
  const GpuFfnLayer layer{.width = 2048, .ffn = 5632};
  const double few = naive_cost(layer, 10, {.nnz_per_token = 10.0});
  EXPECT_LT(few, naive_cost(layer, 20, {.nnz_per_token = 10.0}));
  EXPECT_LT(few, naive_cost(layer, 10, {.nnz_per_token = 100.0}));
}

std::vector<__nv_bfloat16> normal(int64_t n, uint32_t seed, float shift = 0.0f) {
  std::mt19937 draws(seed);
  std::normal_distribution<float> distribution(shift, 1.0f);
  std::vector<__nv_bfloat16> values;
  for (int64_t i = 0; i < n; ++i) values.push_back(__float2bfloat16(distribution(draws)));
  return values;
}

double difference(const std::vector<__nv_bfloat16>& a, const std::vector<__nv_bfloat16>& b) {
  double error = 0.0, size = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += std::pow(__bfloat162float(a[i]) - __bfloat162float(b[i]), 2);
    size += std::pow(__bfloat162float(b[i]), 2);
  }
  return std::sqrt(error / size);  // NaN where anything is NaN
}

TEST(FirstKernel, GivesTheDenseResult) {
  TWELL_GPU_TEST();
  const GpuFfnExecution row = naive_execution();
  for (const int64_t tokens : {1, 127, 129}) {
    for (const bool add : {false, true}) {
      constexpr int64_t kWidth = 136, kFfn = 264;
      const auto x = upload(normal(tokens * kWidth, 1)),
                 residual = upload(normal(tokens * kWidth, 5));
      const auto gate = upload(normal(kFfn * kWidth, 2, -0.1f)),
                 up = upload(normal(kFfn * kWidth, 3)), down = upload(normal(kFfn * kWidth, 4));
      FfnWorkspaceCuda workspace(ctx, tokens, kWidth, kFfn, true);
      const auto run = [&](bool naive) {
        FfnPlansCuda plans(ctx, 1, kFfn, FfnPolicy::kDense);
        auto y = add ? upload(download(residual)) : poisoned<__nv_bfloat16>(tokens * kWidth);
        const FfnForwardCuda problem{
            .tokens = tokens,
            .rows = tokens,
            .weights = {.w_gate = gate.data(), .w_up = up.data(), .w_down = down.data()},
            .x = x.data(),
            .y = y.data(),
            .add = add};
        if (naive) {
          row.launch({ctx, problem, plans[0], workspace.buffers()});
        } else {
          ffn_forward_cuda(ctx, problem, plans[0], workspace);
        }
        plans.update(ctx);
        EXPECT_EQ(plans[0].plan.tokens, tokens);
        EXPECT_GT(plans[0].plan.nnz, 0);
        return download(y);
      };
      const auto once = run(true), again = run(true);
      EXPECT_LT(difference(once, run(false)), std::ldexp(1.0, -7)) << tokens << ", " << add;
      EXPECT_EQ(std::memcmp(once.data(), again.data(), once.size() * sizeof(once[0])), 0);
    }
  }
}

}  // namespace
}  // namespace twell::first_kernel
