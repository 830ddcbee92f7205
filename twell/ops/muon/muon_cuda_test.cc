// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/muon/muon_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/base/rng.h"
#include "twell/ops/adamw/split_weight.h"

namespace twell {
namespace {

std::vector<float> random_values(int64_t count, uint64_t stream) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) values[i] = normal(5, stream, i);
  return values;
}

// Several shapes in the workspace of the largest, twice: the same bits.
TEST(MuonCudaTest, OrthogonalisesAsTheCpu) {
  TWELL_GPU_TEST();
  Context cpu(1);
  const std::vector<std::pair<int64_t, int64_t>> shapes = {
      {1, 1}, {1, 7}, {7, 1}, {5, 9}, {48, 16}, {33, 17}, {200, 1001}, {704, 256}, {256, 256}};
  int64_t bytes = 0;
  for (const auto& [rows, cols] : shapes) bytes = std::max(bytes, orthogonalise_bytes(rows, cols));
  const auto workspace = poisoned<std::byte>(bytes);
  for (const auto& [rows, cols] : shapes) {
    const std::vector<float> from = random_values(rows * cols, static_cast<uint64_t>(rows));
    std::vector<float> want = from;
    orthogonalise(cpu, {want.data(), rows, cols});
    std::vector<float> first;
    for (int round = 0; round < 2; ++round) {
      const auto matrix = upload(from);
      orthogonalise_cuda(ctx, matrix.data(), rows, cols, workspace.data());
      stream.synchronize();
      const std::vector<float> got = download(matrix);
      double off = 0.0, norm = 0.0;
      for (size_t i = 0; i < got.size(); ++i) {
        off += std::pow(got[i] - want[i], 2.0);
        norm += std::pow(want[i], 2.0);
      }
      // Every product rounds to bf16 (2^-9), and the small singular values, of which a random
      // square matrix has some, take errors of the large ones along. Without the last of five
      // iterations the result is a fifth of its norm away.
      EXPECT_LT(std::sqrt(off / norm), 0.05) << rows << " x " << cols;
      if (round == 0) first = got;
      EXPECT_EQ(got, first) << rows << " x " << cols;
    }
  }
}

TEST(MuonCudaTest, MomentumAndStepAreTheCpusBits) {
  TWELL_GPU_TEST();
  Context cpu(1);
  const int64_t n = 1003;
  const MuonCoefficients c =
      muon_coefficients({.learning_rate = 0.02, .momentum = 0.9, .grad_scale = 1.0});
  const auto coefficients = upload(std::vector<MuonCoefficients>{c});
  for (const float clip : {1.0f, 0.25f, std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> grad = random_values(n, 1), exp_avg = random_values(n, 2);
    std::vector<float> weight = random_values(n, 3);
    std::vector<__nv_bfloat16> upper;
    std::vector<int16_t> lower;
    for (float& value : weight) {
      const SplitWeight halves = split_weight(std::bit_cast<uint32_t>(value));
      upper.push_back(std::bit_cast<__nv_bfloat16>(halves.bf16));
      lower.push_back(halves.rest);
    }
    const auto d_grad = upload(grad), d_exp_avg = upload(exp_avg);
    const auto d_clip = upload(std::vector<float>{clip});
    const auto d_upper = upload(upper);
    const auto d_lower = upload(lower);
    TWELL_CUDA_CHECK(launch_muon_momentum(
        {n, coefficients.data(), d_clip.data(), d_grad.data(), d_exp_avg.data()}, stream.get()));
    TWELL_CUDA_CHECK(launch_muon_apply({.size = n,
                                        .coefficients = coefficients.data(),
                                        .clip_factor = d_clip.data(),
                                        .shape_factor = 3.0f,
                                        .orthogonal = d_grad.data(),
                                        .weight = d_upper.data(),
                                        .weight_rest = d_lower.data()},
                                       stream.get()));
    stream.synchronize();
    if (!std::isnan(clip)) {
      MuonCoefficients clipped = c;
      clipped.grad_scale = clip;
      muon_momentum(cpu, clipped, grad, exp_avg);
      muon_apply(cpu, c, 3.0f, weight, grad);
    }
    EXPECT_EQ(download(d_grad), grad);
    EXPECT_EQ(download(d_exp_avg), exp_avg);
    const auto got_upper = download(d_upper);
    const auto got_lower = download(d_lower);
    for (size_t i = 0; i < weight.size(); ++i) {
      const uint32_t joined = join_weight({std::bit_cast<uint16_t>(got_upper[i]), got_lower[i]});
      EXPECT_EQ(std::bit_cast<float>(joined), weight[i]) << clip << " " << i;
    }
  }
}

}  // namespace
}  // namespace twell
