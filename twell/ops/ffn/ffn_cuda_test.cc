// SPDX-License-Identifier: Apache-2.0
// The whole layer on the GPU against double precision: dense, gate GEMM with tile-union, and the
// first tokens as a small batch. No sparse execution may be further off than the dense one, and
// following the gate GEMM changes nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/base/rng.h"
#include "twell/ops/ffn/few_tokens/batch_ffn_cuda.h"
#include "twell/ops/ffn/ffn_cuda.h"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"
#include "twell/ops/ffn/row_fused/row_fused_cuda.h"
#include "twell/ops/ffn/tile_union/tile_union_cuda.h"

namespace twell {
namespace {

std::vector<__nv_bfloat16> normal_bf16(int64_t n, uint64_t stream, float scale) {
  std::vector<__nv_bfloat16> values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = __float2bfloat16(scale * normal(11, stream, i));
  }
  return values;
}

std::vector<double> widened(const std::vector<__nv_bfloat16>& values) {
  std::vector<double> out(values.size());
  std::transform(values.begin(), values.end(), out.begin(),
                 [](__nv_bfloat16 v) { return static_cast<double>(__bfloat162float(v)); });
  return out;
}

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

std::vector<double> reference_ffn(const std::vector<double>& x, const std::vector<double>& gate,
                                  const std::vector<double>& up, const std::vector<double>& down,
                                  int64_t tokens, int64_t width, int64_t ffn, bool squared) {
  std::vector<double> y(x.size());
  for (int64_t m = 0; m < tokens; ++m) {
    const double* row = x.data() + m * width;
    for (int64_t n = 0; n < ffn; ++n) {
      // The weight that decides whether a neuron fires is w_gate, or w_up without a gate.
      const double fires = dot(row, (gate.empty() ? up : gate).data() + n * width, width);
      if (fires <= 0.0) continue;
      const double f = squared ? fires * fires : fires;
      const double h = gate.empty() ? f : f * dot(row, up.data() + n * width, width);
      for (int64_t d = 0; d < width; ++d) {
        y[static_cast<size_t>(m * width + d)] += h * down[static_cast<size_t>(n * width + d)];
      }
    }
  }
  return y;
}

double relative_error(const std::vector<__nv_bfloat16>& got, const std::vector<double>& want) {
  double error = 0.0, size = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double difference = static_cast<double>(__bfloat162float(got[i])) - want[i];
    error += difference * difference;
    size += want[i] * want[i];
  }
  return std::sqrt(error / size);  // NaN where anything is NaN
}

class FfnCudaTest : public testing::TestWithParam<std::tuple<bool, Activation>> {};

TEST_P(FfnCudaTest, SparseIsAsCloseToExactAsDense) {
  TWELL_HOPPER_TEST();
  const auto [gated, activation] = GetParam();
  const bool squared = activation == Activation::kRelu2;
  const int64_t tokens = 260, width = 320, ffn = 1000;
  const auto x = normal_bf16(tokens * width, 0, 1.0f);
  auto firing = normal_bf16(ffn * width, 1, 0.05f);
  const auto other = normal_bf16(ffn * width, 2, 0.05f);
  const auto down = normal_bf16(ffn * width, 3, 0.05f);
  // Every fifth neuron fires on half of the tokens, the others on none or a few.
  auto biased = x;
  for (int64_t m = 0; m < tokens; ++m) {
    biased[static_cast<size_t>(m * width)] = __float2bfloat16(1.0f);
  }
  for (int64_t n = 0; n < ffn; ++n) {
    firing[static_cast<size_t>(n * width)] = __float2bfloat16(n % 5 == 0 ? 0.0f : -2.5f);
  }
  const auto device_x = upload(biased);
  const auto device_firing = upload(firing), device_other = upload(other),
             device_down = upload(down);
  const FfnWeightsCuda weights{gated ? device_firing.data() : nullptr,
                               gated ? device_other.data() : device_firing.data(),
                               device_down.data(), activation};
  const auto none = std::vector<double>();
  const auto want =
      reference_ffn(widened(biased), gated ? widened(firing) : none,
                    widened(gated ? other : firing), widened(down), tokens, width, ffn, squared);

  const auto dense_y = poisoned<__nv_bfloat16>(tokens * width);
  // Poisoned, so that NaN shows what is not written. initcheck cannot show it, since it does not
  // see stores of cuBLASLt's kernels through TMA.
  const auto gate = poisoned<__nv_bfloat16>(tokens * ffn);
  const auto hidden = poisoned<__nv_bfloat16>(tokens * ffn);
  const DenseFfnCuda dense(ctx, tokens, width, ffn, gated, gate.data(), hidden.data(), activation);
  dense.forward(ctx, weights, device_x.data(), dense_y.data());

  const TwellShape shape{tokens, ffn, 256, 8};
  const auto words = poisoned<uint32_t>(shape.words());
  const auto spill = poisoned<BF16>(shape.max_spill_slots() * shape.tile);
  const auto row_nnz = poisoned<int32_t>(tokens);
  const TwellPacked packed{shape, words.data(), spill.data(), shape.max_spill_slots(),
                           row_nnz.data()};
  const auto sparse_y = poisoned<__nv_bfloat16>(tokens * width);
  TileUnionWorkspace workspace(tokens, ffn);
  gate_gemm_cuda(ctx, {tokens, width, ffn, device_x.data(), device_firing.data(), packed});
  const SparseUpDownCuda up_down{.tokens = tokens,
                                 .width = width,
                                 .ffn = ffn,
                                 .gate = packed,
                                 .x = device_x.data(),
                                 .w_up = gated ? weights.w_up : nullptr,
                                 .w_down = weights.w_down,
                                 .y = sparse_y.data(),
                                 .squared = squared};
  tile_union_up_down_cuda(ctx, up_down, workspace);
  const auto row_fused_y = poisoned<__nv_bfloat16>(tokens * width);
  SparseUpDownCuda by_rows = up_down;
  by_rows.y = row_fused_y.data();
  RowFusedWorkspace row_fused_workspace(ctx, tokens, width);
  row_fused_up_down_cuda(ctx, by_rows, row_fused_workspace);
  const int64_t few = kMaxFewTokens;
  const auto few_y = poisoned<__nv_bfloat16>(few * width);
  FewTokenWorkspace few_workspace(ffn);
  BatchFfnCuda few_tokens{.tokens = few,
                          .width = width,
                          .ffn = ffn,
                          .x = device_x.data(),
                          .w_gate = weights.w_gate,
                          .w_up = weights.w_up,
                          .w_down = weights.w_down,
                          .y = few_y.data(),
                          .squared = squared};
  few_token_ffn_cuda(ctx, few_tokens, few_workspace);
  const auto rows_y = poisoned<__nv_bfloat16>(8 * width);
  few_tokens.tokens = 8;
  few_tokens.y = rows_y.data();
  few_token_ffn_cuda(ctx, few_tokens, few_workspace);
  stream.synchronize();

  const double dense_error = relative_error(download(dense_y), want);
  const double sparse_error = relative_error(download(sparse_y), want);
  EXPECT_LT(dense_error, std::ldexp(1.0, -7));
  // Non-gated layers round in the same places; only the order of the sums differs.
  EXPECT_LE(sparse_error, dense_error * (gated ? 1.0 : 1.01));
  EXPECT_LE(relative_error(download(row_fused_y), want), dense_error * (gated ? 1.0 : 1.01));
  const auto expect_first_rows = [&](const std::vector<__nv_bfloat16>& y) {
    auto first_want = want;
    auto first_dense = download(dense_y);
    first_want.resize(y.size());
    first_dense.resize(y.size());
    EXPECT_LE(relative_error(y, first_want),
              relative_error(first_dense, first_want) * (gated ? 1.0 : 1.01));
  };
  expect_first_rows(download(few_y));
  expect_first_rows(download(rows_y));
}

INSTANTIATE_TEST_SUITE_P(Layers, FfnCudaTest,
                         testing::Combine(testing::Bool(),
                                          testing::Values(Activation::kRelu, Activation::kRelu2)));

class FollowedGateCudaTest : public testing::TestWithParam<int64_t> {};

// Every 37th row fires on nearly everything.
TEST_P(FollowedGateCudaTest, ChangesNothing) {
  TWELL_HOPPER_TEST();
  const int64_t tokens = GetParam(), width = 192, ffn = 1000;
  auto x = normal_bf16(tokens * width, 0, 1.0f);
  for (int64_t m = 0; m < tokens; ++m) {
    x[static_cast<size_t>(m * width)] = __float2bfloat16(m % 37 == 0 ? -1.0f : 1.0f);
  }
  auto gate = normal_bf16(ffn * width, 1, 0.05f);
  for (int64_t n = 0; n < ffn; ++n) {
    gate[static_cast<size_t>(n * width)] = __float2bfloat16(n % 5 == 0 ? -1.0f : -2.5f);
  }
  const auto device_x = upload(x), device_gate = upload(gate),
             device_up = upload(normal_bf16(ffn * width, 2, 0.05f)),
             device_down = upload(normal_bf16(ffn * width, 3, 0.05f));
  TileUnionWorkspace workspace(10000, ffn);
  const TwellShape shape{tokens, ffn, 256, 8};
  const auto y_of = [&](bool follows) {
    const auto words = poisoned<uint32_t>(shape.words());
    const auto spill = poisoned<BF16>(shape.max_spill_slots() * shape.tile);
    const auto row_nnz = poisoned<int32_t>(tokens);
    const TwellPacked packed{shape, words.data(), spill.data(), shape.max_spill_slots(),
                             row_nnz.data()};
    const auto y = poisoned<__nv_bfloat16>(tokens * width);
    gate_gemm_cuda(ctx, {.tokens = tokens,
                         .width = width,
                         .ffn = ffn,
                         .x = device_x.data(),
                         .w_gate = device_gate.data(),
                         .out = packed,
                         .progress = follows ? workspace.progress(tokens) : GateProgress{}});
    tile_union_up_down_cuda(ctx,
                            {.tokens = tokens,
                             .width = width,
                             .ffn = ffn,
                             .gate = packed,
                             .x = device_x.data(),
                             .w_up = device_up.data(),
                             .w_down = device_down.data(),
                             .y = y.data(),
                             .follows_gate = follows},
                            workspace);
    stream.synchronize();
    return widened(download(y));
  };
  const auto want = y_of(false);
  EXPECT_TRUE(std::none_of(want.begin(), want.end(), [](double v) { return std::isnan(v); }));
  for (int run = 0; run < 5; ++run) EXPECT_EQ(y_of(true), want);
}

// Unions that are found while the gate GEMM ends: gates of less than a round of its tiles, of a
// last round that is cut and of one that is not.
INSTANTIATE_TEST_SUITE_P(Tokens, FollowedGateCudaTest,
                         testing::Values(1, 127, 129, 2048, 4224, 8000, 9001),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace twell
