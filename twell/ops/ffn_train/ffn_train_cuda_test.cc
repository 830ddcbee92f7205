// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn_train/ffn_train_cuda.h"

#include <gtest/gtest.h>

#include "twell/ops/ffn_train/ffn_train_cuda_testing.h"

namespace twell {
namespace {

using reference::Problem;

struct Case {
  std::string name;
  int64_t tokens, width, ffn;
  int64_t (*row_nnz)(int64_t m, int64_t ffn);  // active neurons of token m
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

int64_t none(int64_t, int64_t) { return 0; }
int64_t all(int64_t, int64_t ffn) { return ffn; }
int64_t few(int64_t m, int64_t ffn) { return m % std::max<int64_t>(1, ffn / 16); }
int64_t one_full_row(int64_t m, int64_t ffn) { return m == 1 ? ffn : m % 5; }
int64_t third_full(int64_t m, int64_t ffn) { return m % 3 == 0 ? ffn : m % 7; }
int64_t heavy_start(int64_t m, int64_t ffn) { return m % 200 < 4 ? ffn - m % 3 : m % 9; }

class FfnTrainCudaTest : public testing::TestWithParam<std::tuple<Case, bool>> {};

TEST_P(FfnTrainCudaTest, DenseMatchesTheReference) {
  if (const std::string why = cuda_unavailable(); !why.empty()) GTEST_SKIP() << why;
  const auto& [c, gated] = GetParam();
  const auto row_nnz = [fn = c.row_nnz, ffn = c.ffn](int64_t m) { return fn(m, ffn); };
  Problem p = reference::make_bf16_problem(c.tokens, c.width, c.ffn, gated, row_nnz);
  p.l1_scale = 0.25;
  const reference::Result expected = reference::run(p);
  const TestStream stream;
  CudaContext ctx(stream.get());
  LayerCuda layer(ctx, p);
  const LayerResult got = layer.run(FfnTrainExecution::kDense, -1.0);
  expect_matches(got, p, expected);
  EXPECT_EQ(got, layer.run(FfnTrainExecution::kDense, -1.0));
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, FfnTrainCudaTest,
    testing::Combine(
        testing::Values(Case{"one_token", 1, 16, 48, few}, Case{"one_empty_token", 1, 8, 64, none},
                        Case{"one_full_token", 1, 8, 64, all}, Case{"all_empty", 127, 24, 64, none},
                        Case{"all_full", 129, 72, 328, all}, Case{"few", 1000, 136, 584, few},
                        Case{"one_full_row", 129, 40, 200, one_full_row},
                        Case{"third_full", 300, 264, 520, third_full},
                        Case{"heavy_start", 1000, 64, 1032, heavy_start},
                        Case{"wide_ffn", 3, 24, 8200, few}, Case{"tiny", 5, 8, 8, few}),
        testing::Bool()),
    [](const auto& suite_info) {
      return std::get<0>(suite_info.param).name +
             (std::get<1>(suite_info.param) ? "_gated" : "_plain");
    });

TEST(FfnTrainCudaContract, RefusesWhatDoesNotFit) {
  if (const std::string why = cuda_unavailable(); !why.empty()) GTEST_SKIP() << why;
  const TestStream stream;
  CudaContext ctx(stream.get());
  const Problem p = reference::make_bf16_problem(4, 8, 16, true, [](int64_t) { return 2; });
  LayerCuda layer(ctx, p);
  FfnTrainForwardCuda forward = layer.forward();
  forward.tokens = 5;
  EXPECT_THROW(ffn_train_forward_cuda(ctx, forward, layer.saved, layer.workspace), Error);
  forward = layer.forward();
  forward.weights.w_gate = nullptr;
  EXPECT_THROW(ffn_train_forward_cuda(ctx, forward, layer.saved, layer.workspace), Error);
  // Nothing is saved yet.
  EXPECT_THROW(ffn_train_backward_cuda(ctx, layer.backward(), layer.saved, layer.workspace), Error);
}

TEST(FfnTrainCudaContract, BytesAreWhatIsAllocated) {
  if (const std::string why = cuda_unavailable(); !why.empty()) GTEST_SKIP() << why;
  const TestStream stream;
  CudaContext ctx(stream.get());
  for (const bool gated : {true, false}) {
    const FfnTrainShapeCuda shape{1000, 64, 200, gated};
    FfnSavedCuda saved(ctx, shape);
    EXPECT_EQ(saved.bytes(), FfnSavedCuda::bytes_needed(shape, FfnTrainExecution::kDense, -1.0));
    const FfnTrainWorkspaceCuda workspace(ctx, shape);
    EXPECT_EQ(workspace.bytes(), FfnTrainWorkspaceCuda::bytes_needed(ctx, shape));
  }
}

}  // namespace
}  // namespace twell
