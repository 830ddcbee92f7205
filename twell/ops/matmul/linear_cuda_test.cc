// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/matmul/linear_cuda.h"

#include <cublasLt.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"
#include "twell/ops/matmul/matmul_cuda.h"

namespace twell {
namespace {

struct LinearCase {
  int64_t rows, cols, inner;
};

class LinearCudaTest : public testing::TestWithParam<LinearCase> {};

// |error| <= 2^-8 |y| for the rounding of y, and 2^-20 of sum |x| |w| for that of the f32 sums.
TEST_P(LinearCudaTest, EqualsDoublePrecision) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [rows, cols, inner] = GetParam();
  const CudaStream stream;
  CudaContext ctx(stream.get());
  const auto x = random_bf16(rows * inner, 1), w = random_bf16(cols * inner, 2);
  const auto device_x = upload(x), device_w = upload(w);
  const auto y = poisoned<__nv_bfloat16>(rows * cols);
  const auto y_f32 = poisoned<float>(rows * cols);
  LinearCuda problem{rows, cols, inner, device_x.data(), device_w.data(), y.data(), false};
  linear_cuda(ctx, problem);
  problem.y = y_f32.data();
  problem.f32_out = true;
  linear_cuda(ctx, problem);
  const auto before = random_bf16(rows * cols, 5);
  const auto sum = upload(before);
  problem.y = sum.data();
  problem.f32_out = false;
  problem.add = true;
  linear_cuda(ctx, problem);
  stream.synchronize();
  const auto got = to_floats(download(y)), got_sum = to_floats(download(sum)),
             added = to_floats(before);
  const auto got_f32 = download(y_f32);
  const auto x_f = to_floats(x), w_f = to_floats(w);
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < cols; ++n) {
      double want = 0.0, size = 0.0;
      for (int64_t k = 0; k < inner; ++k) {
        const double term = static_cast<double>(x_f[static_cast<size_t>(m * inner + k)]) *
                            w_f[static_cast<size_t>(n * inner + k)];
        want += term;
        size += std::abs(term);
      }
      const auto at = static_cast<size_t>(m * cols + n);
      const double sums = size * std::ldexp(1.0, -20);
      ASSERT_NEAR(got_f32[at], want, sums) << m << ", " << n;
      ASSERT_NEAR(got[at], want, sums + std::abs(want) * std::ldexp(1.0, -8)) << m << ", " << n;
      // cuBLASLt may round the product before it adds.
      const double both = want + added[at];
      ASSERT_NEAR(got_sum[at], both, sums + (std::abs(both) + std::abs(want)) * std::ldexp(1.0, -8))
          << m << ", " << n;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, LinearCudaTest,
                         testing::Values(LinearCase{1, 8, 8}, LinearCase{1, 136, 2048},
                                         LinearCase{2, 264, 264}, LinearCase{3, 72, 1000},
                                         LinearCase{5, 40, 328}, LinearCase{8, 1016, 512},
                                         LinearCase{9, 48, 64}, LinearCase{1, 257, 40},
                                         LinearCase{33, 57, 72}, LinearCase{129, 264, 320}));

// The few-row kernels' result for a token does not depend on the tokens beside it.
// Needs the toolkit's library and no GPU.
TEST(CublasLt, EveryFunctionIsFoundInTheLibrary) {
  EXPECT_EQ(cublasLtGetVersion() / 10000, CUBLAS_VER_MAJOR);
  EXPECT_FALSE(std::string(cublasLtGetStatusString(CUBLAS_STATUS_INVALID_VALUE)).empty());
  cublasLtMatrixLayout_t layout = nullptr;
  EXPECT_EQ(cublasLtMatrixLayoutCreate(&layout, CUDA_R_16BF, 8, 8, 8), CUBLAS_STATUS_SUCCESS);
  cublasLtMatmulDesc_t operation = nullptr;
  EXPECT_EQ(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
            CUBLAS_STATUS_SUCCESS);
  const cublasOperation_t transposed = CUBLAS_OP_T;
  EXPECT_EQ(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                           sizeof(transposed)),
            CUBLAS_STATUS_SUCCESS);
  cublasLtMatmulPreference_t preference = nullptr;
  EXPECT_EQ(cublasLtMatmulPreferenceCreate(&preference), CUBLAS_STATUS_SUCCESS);
  const size_t bytes = 1 << 20;
  EXPECT_EQ(cublasLtMatmulPreferenceSetAttribute(
                preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof(bytes)),
            CUBLAS_STATUS_SUCCESS);
  // These report what they were not given.
  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  EXPECT_NE(cublasLtMatmulAlgoGetHeuristic(nullptr, operation, layout, layout, layout, layout,
                                           preference, 1, &result, &found),
            CUBLAS_STATUS_SUCCESS);
  EXPECT_NE(cublasLtMatmulAlgoConfigGetAttribute(&result.algo, CUBLASLT_ALGO_CONFIG_TILE_ID,
                                                 nullptr, 0, nullptr),
            CUBLAS_STATUS_SUCCESS);
  cublasLtMatmulAlgo_t algorithm{};
  EXPECT_NE(cublasLtMatmulAlgoInit(nullptr, CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_16BF,
                                   CUDA_R_16BF, CUDA_R_16BF, CUDA_R_16BF, 0, &algorithm),
            CUBLAS_STATUS_SUCCESS);
  EXPECT_NE(cublasLtMatmulAlgoCapGetAttribute(&algorithm, CUBLASLT_ALGO_CAP_TILE_IDS, nullptr, 0,
                                              nullptr),
            CUBLAS_STATUS_SUCCESS);
  EXPECT_NE(
      cublasLtMatmulAlgoConfigSetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID, nullptr, 0),
      CUBLAS_STATUS_SUCCESS);
  EXPECT_NE(cublasLtMatmulAlgoCheck(nullptr, operation, layout, layout, layout, layout, &algorithm,
                                    &result),
            CUBLAS_STATUS_SUCCESS);
  EXPECT_NE(cublasLtMatmul(nullptr, operation, nullptr, nullptr, layout, nullptr, layout, nullptr,
                           nullptr, layout, nullptr, layout, nullptr, nullptr, 0, nullptr),
            CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(cublasLtMatmulPreferenceDestroy(preference), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(cublasLtMatmulDescDestroy(operation), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(cublasLtMatrixLayoutDestroy(layout), CUBLAS_STATUS_SUCCESS);
}

TEST(LinearCudaTest, FewRowsDoNotDependOnEachOther) {
  TWELL_GPU_TEST();
  const int64_t cols = 264, inner = 1032;
  const auto x = upload(random_bf16(8 * inner, 3)), w = upload(random_bf16(cols * inner, 4));
  const auto together = poisoned<float>(8 * cols);
  linear_cuda(ctx, {8, cols, inner, x.data(), w.data(), together.data(), true});
  for (int64_t rows : {1, 2, 4}) {
    const auto apart = poisoned<float>(8 * cols);
    for (int64_t m = 0; m < 8; m += rows) {
      linear_cuda(
          ctx, {rows, cols, inner, x.data() + m * inner, w.data(), apart.data() + m * cols, true});
    }
    stream.synchronize();
    EXPECT_EQ(download(apart), download(together)) << rows;
  }
}

// A plan tries proposals of cuBLASLt while it is in use, which no result may show.
TEST(MatmulPlanCuda, EveryTrialGivesTheSameBits) {
  TWELL_GPU_TEST();
  const DeviceBuffer<std::byte> busy(int64_t{1}
                                     << 29);  // filled so that the GPU is behind the host
  int64_t tried = 0;
  for (const MatmulShapeCuda& shape : std::vector<MatmulShapeCuda>{
           {.rows = 100, .cols = 2048, .inner = 512, .trans_b = true, .relu = true},
           {.rows = 65, .cols = 1024, .inner = 1024, .trans_b = true, .f32_out = true},
           {.rows = 300, .cols = 64, .inner = 512, .f32_out = true, .trans_a = true},
           {.rows = 512, .cols = 300, .inner = 64, .trans_b = true},
           {.rows = 72, .cols = 2048, .inner = 8192},
           {.rows = 192, .cols = 2560, .inner = 6912, .add = true},
           {.rows = 2048, .cols = 1024, .inner = 2816, .add = true},
           {.rows = 1024, .cols = 512, .inner = 2816, .f32_out = true, .trans_a = true},
           {.rows = 512,
           .cols = 1024,
           .inner = 2048,
           .f32_out = true,
           .trans_a = true,
           .add = true}}) {
    MatmulPlanCuda plan(ctx, shape);
    const auto a = upload(random_bf16(shape.rows * shape.inner, 1)),
               b = upload(random_bf16(shape.cols * shape.inner, 2));
    const int64_t words = shape.rows * shape.cols / (shape.f32_out ? 1 : 2);
    const DeviceBuffer<uint32_t> c(words);
    std::vector<uint32_t> first;
    for (int64_t run = 0; run < MatmulPlanCuda::kRunsToSettle; ++run) {
      tried += !plan.settled();
      TWELL_CUDA_CHECK(
          cudaMemsetAsync(c.data(), 0x3d, static_cast<size_t>(c.bytes()), stream.get()));
      TWELL_CUDA_CHECK(
          cudaMemsetAsync(busy.data(), 0, static_cast<size_t>(busy.bytes()), stream.get()));
      plan.run(ctx, a.data(), b.data(), c.data());
      stream.synchronize();
      const auto got = download(c);
      if (run == 0) first = got;
      ASSERT_EQ(got, first) << shape.rows << " x " << shape.cols << ", run " << run;
    }
    EXPECT_TRUE(plan.settled());
  }
  EXPECT_GT(tried, 0);
}

// A captured run is not timed, and leaves the plan as it was.
TEST(MatmulPlanCuda, DoesNotTimeWhatIsCaptured) {
  TWELL_GPU_TEST();
  const MatmulShapeCuda shape{.rows = 512, .cols = 1024, .inner = 512, .trans_b = true};
  MatmulPlanCuda plan(ctx, shape);
  const auto a = upload(random_bf16(shape.rows * shape.inner, 1)),
             b = upload(random_bf16(shape.cols * shape.inner, 2));
  const auto c = poisoned<__nv_bfloat16>(shape.rows * shape.cols);
  const auto run = [&] { plan.run(ctx, a.data(), b.data(), c.data()); };
  const bool settled = plan.settled();
  const CudaGraph graph(stream.get(), [&] {
    for (int64_t i = 0; i < MatmulPlanCuda::kRunsToSettle; ++i) run();
  });
  EXPECT_EQ(plan.settled(), settled);
  graph.launch(stream.get());
  stream.synchronize();
  const auto captured = to_floats(download(c));
  run();
  stream.synchronize();
  EXPECT_EQ(to_floats(download(c)), captured);
}

// In a portable build they run on cuBLASLt's kernels for compute capability 8.0.
TEST(MatmulPlanCuda, TunedProductsAreTheOthers) {
  TWELL_GPU_TEST();
  for (const MatmulShapeCuda& shape : std::vector<MatmulShapeCuda>{
           {.rows = 100, .cols = 1024, .inner = 512, .trans_b = true, .relu = true},
           {.rows = 64, .cols = 264, .inner = 5632},
           {.rows = 1100, .cols = 520, .inner = 328, .add = true},
           {.rows = 512, .cols = 256, .inner = 1000, .f32_out = true, .trans_a = true}}) {
    const auto a = upload(random_bf16(shape.rows * shape.inner, 1)),
               b = upload(random_bf16(shape.cols * shape.inner, 2));
    const auto product = [&](bool tuned) {
      const DeviceBuffer<float> f32(shape.f32_out ? shape.rows * shape.cols : 0);
      const DeviceBuffer<__nv_bfloat16> bf16(shape.f32_out ? 0 : shape.rows * shape.cols);
      void* const c = shape.f32_out ? static_cast<void*>(f32.data()) : bf16.data();
      const int64_t bytes = shape.f32_out ? f32.bytes() : bf16.bytes();
      TWELL_CUDA_CHECK(cudaMemsetAsync(c, 0, static_cast<size_t>(bytes), ctx.stream()));
      set_matmul_tuning(ctx, tuned);
      MatmulPlanCuda plan(ctx, shape);
      plan.run(ctx, a.data(), b.data(), c);
      stream.synchronize();
      return shape.f32_out ? download(f32) : to_floats(download(bf16));
    };
    const std::vector<float> want = product(false), got = product(true);
    double difference = 0.0, size = 0.0;
    for (size_t i = 0; i < want.size(); ++i) {
      difference += std::pow(double{got[i]} - double{want[i]}, 2.0);
      size += double{want[i]} * double{want[i]};
    }
    EXPECT_GT(size, 0.0);
    EXPECT_LT(difference, std::ldexp(size, -14)) << shape.rows << " x " << shape.cols;
  }
  set_matmul_tuning(ctx, false);
}

}  // namespace
}  // namespace twell
