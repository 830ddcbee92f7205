// SPDX-License-Identifier: Apache-2.0
// Inputs are small integers, so that every sum is exact in f32 and y has one right answer to the
// bit: only the roundings of g, of h and of y to bf16 are left, and the test makes the same ones.
#include "twell/ops/ffn/few_tokens/batch_ffn_cuda.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"

namespace twell {
namespace {

// The kernels for Hopper, and those for every GPU.
using FewTokenFfn = void (*)(CudaContext&, const BatchFfnCuda&, FewTokenWorkspace&);

struct FewTokenCase {
  const char* name;
  int64_t tokens, width, ffn;
  int bias;  // of every neuron: sets how many fire
  bool gated = true;
  bool up_relu = false;  // dReLU
};

struct FewTokenProblem {
  explicit FewTokenProblem(const FewTokenCase& c)
      : spec(c),
        x(random_signs(c.tokens * c.width, 1)),
        w_first(random_signs(c.ffn * c.width, 2)),
        w_up(random_signs(c.gated ? c.ffn * c.width : 0, 3)),
        w_down(random_signs(c.ffn * c.width, 4)) {
    for (int64_t m = 0; m < c.tokens; ++m) x[static_cast<size_t>(m * c.width)] = 1;
    for (int64_t n = 0; n < c.ffn; ++n) {
      w_first[static_cast<size_t>(n * c.width)] = static_cast<int8_t>(c.bias);
    }
    device_x = upload(to_bf16s(x));
    device_first = upload(to_bf16s(w_first));
    device_up = upload(to_bf16s(w_up));
    device_down = upload(to_bf16s(w_down));
    activity = upload(std::vector<ActivityCuda>(1));
  }

  // Computes the layer as its contract defines it, and counts active neurons.
  std::vector<float> expected(const std::vector<int8_t>& residual = {}) {
    std::vector<float> y(residual.begin(), residual.end());
    y.resize(x.size());
    for (int64_t n = 0; n < spec.ffn; ++n) {
      const int8_t* down = w_down.data() + n * spec.width;
      for (int64_t m = 0; m < spec.tokens; ++m) {
        const int8_t* row = x.data() + m * spec.width;
        const int sum = dot_of_signs(row, w_first.data() + n * spec.width, spec.width);
        if (sum <= 0) continue;
        ++nonzeros;
        float h = rounded_to_bf16(static_cast<float>(sum));
        if (spec.gated) {
          const int up = dot_of_signs(row, w_up.data() + n * spec.width, spec.width);
          h = rounded_to_bf16(h * static_cast<float>(spec.up_relu ? std::max(up, 0) : up));
        }
        float* out = y.data() + m * spec.width;
        for (int64_t d = 0; d < spec.width; ++d) out[d] += h * static_cast<float>(down[d]);
      }
    }
    for (float& value : y) value = rounded_to_bf16(value);
    return y;
  }

  BatchFfnCuda problem(__nv_bfloat16* y) const {
    BatchFfnCuda out{spec.tokens,
                     spec.width,
                     spec.ffn,
                     device_x.data(),
                     spec.gated ? device_first.data() : nullptr,
                     spec.gated ? device_up.data() : device_first.data(),
                     device_down.data(),
                     y,
                     /*norm=*/nullptr,
                     /*eps=*/0.0f,
                     /*add=*/false,
                     activity.data()};
    out.up_relu = spec.up_relu;
    return out;
  }

  std::vector<__nv_bfloat16> run(CudaContext& ctx, const CudaStream& stream,
                                 FewTokenWorkspace& workspace,
                                 FewTokenFfn ffn = few_token_ffn_cuda) const {
    const auto y = poisoned<__nv_bfloat16>(spec.tokens * spec.width);
    ffn(ctx, problem(y.data()), workspace);
    stream.synchronize();
    return download(y);
  }

  FewTokenCase spec;
  std::vector<int8_t> x, w_first, w_up, w_down;
  DeviceBuffer<__nv_bfloat16> device_x, device_first, device_up, device_down;
  DeviceBuffer<ActivityCuda> activity;
  unsigned long long nonzeros = 0;
};

void expect_equal(const std::vector<__nv_bfloat16>& got, const std::vector<float>& want,
                  int64_t width) {
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(__bfloat162float(got[i]), want[i]) << "token " << static_cast<int64_t>(i) / width
                                                 << " column " << static_cast<int64_t>(i) % width;
  }
}

class FewTokenFfnCudaTest : public testing::TestWithParam<FewTokenCase> {};

TEST_P(FewTokenFfnCudaTest, IsTheDenseLayerToTheBitAndRepeats) {
  TWELL_HOPPER_TEST();
  FewTokenProblem problem(GetParam());
  FewTokenWorkspace workspace(problem.spec.ffn);
  const auto want = problem.expected();
  const auto once = problem.run(ctx, stream, workspace);
  expect_equal(once, want, problem.spec.width);
  const auto counted = download(problem.activity);
  EXPECT_EQ(counted[0].nnz, problem.nonzeros);
  EXPECT_EQ(counted[0].tokens, static_cast<unsigned long long>(problem.spec.tokens));
  const auto again = problem.run(ctx, stream, workspace);
  EXPECT_EQ(std::memcmp(once.data(), again.data(), once.size() * sizeof(once[0])), 0);
}

// Up to 8 tokens of at most 4,096 columns.
bool streams(const FewTokenCase& spec) { return spec.tokens <= 8 && spec.width <= kMaxStreamWidth; }

TEST_P(FewTokenFfnCudaTest, StreamIsTheDenseLayerToTheBitAndRepeats) {
  TWELL_HOPPER_TEST();
  if (!streams(GetParam())) return;
  FewTokenProblem problem(GetParam());
  FewTokenWorkspace workspace(problem.spec.ffn, problem.spec.width);
  const auto want = problem.expected();
  const auto once = problem.run(ctx, stream, workspace, row_stream_ffn_cuda);
  expect_equal(once, want, problem.spec.width);
  const auto counted = download(problem.activity);
  EXPECT_EQ(counted[0].nnz, problem.nonzeros);
  EXPECT_EQ(counted[0].tokens, static_cast<unsigned long long>(problem.spec.tokens));
  const auto again = problem.run(ctx, stream, workspace, row_stream_ffn_cuda);
  EXPECT_EQ(std::memcmp(once.data(), again.data(), once.size() * sizeof(once[0])), 0);
}

// Rows take up to 8 tokens whose x fits into shared memory, batches up to 32.
TEST_P(FewTokenFfnCudaTest, PortableIsTheDenseLayerToTheBitAndRepeats) {
  TWELL_GPU_TEST();
  FewTokenProblem problem(GetParam());
  FewTokenWorkspace workspace(problem.spec.ffn);
  const auto want = problem.expected();
  unsigned long long calls = 0;
  for (const FewTokenFfn ffn : {portable_rows_ffn_cuda, portable_batch_ffn_cuda}) {
    if (problem.spec.tokens > (ffn == portable_rows_ffn_cuda ? 8 : kMaxPortableBatch)) continue;
    const auto once = problem.run(ctx, stream, workspace, ffn);
    expect_equal(once, want, problem.spec.width);
    const auto counted = download(problem.activity);
    EXPECT_EQ(counted[0].nnz, (calls + 1) * problem.nonzeros);
    EXPECT_EQ(counted[0].tokens,
              (calls + 1) * static_cast<unsigned long long>(problem.spec.tokens));
    const auto again = problem.run(ctx, stream, workspace, ffn);
    EXPECT_EQ(std::memcmp(once.data(), again.data(), once.size() * sizeof(once[0])), 0);
    calls += 2;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, FewTokenFfnCudaTest,
    testing::Values(
        FewTokenCase{"smallest", 1, 8, 8, 0}, FewTokenCase{"two tokens", 2, 320, 1000, -20},
        // The last CTA of each cluster has no columns.
        FewTokenCase{"narrow, half fires 16", 16, 320, 5632, 0},
        FewTokenCase{"seven", 7, 72, 264, -3}, FewTokenCase{"eight", 8, 320, 1000, -25},
        FewTokenCase{"nine", 9, 320, 1000, -25}, FewTokenCase{"sixteen", 16, 520, 2048, -30},
        FewTokenCase{"seventeen", 17, 136, 1000, -10},
        FewTokenCase{"thirty one", 31, 320, 1000, -20},
        FewTokenCase{"thirty three", 33, 320, 1000, -25},
        FewTokenCase{"sixty four", 64, 320, 1000, -25}, FewTokenCase{"wide x 9", 9, 12808, 64, 0},
        FewTokenCase{"wide x 24", 24, 9224, 64, 0}, FewTokenCase{"wide x 64", 64, 8200, 104, -60},
        FewTokenCase{"wide x 5", 5, 8200, 104, -60},
        FewTokenCase{"wide x 8 two passes", 8, 2056, 7000, -70},
        FewTokenCase{"wide x 3 everything fires", 3, 4104, 264, 127},
        // Streams of clusters of one to four CTAs, the last one with fewer columns; a few neurons
        // each.
        FewTokenCase{"stream 8 x 4096", 8, 4096, 2120, -125},
        FewTokenCase{"stream 6 x 3080", 6, 3080, 4224, -60},
        FewTokenCase{"stream 4 x 2056", 4, 2056, 264, 0},
        FewTokenCase{"stream 3 x 1000", 3, 1000, 2113 * 8, -30},
        FewTokenCase{"stream 8 x 4088 all", 8, 4088, 4232, 127},
        FewTokenCase{"stream 1 x 4096", 1, 4096, 5632, -80},
        // Neurons whose gates are active, but h is 0 for every token.
        FewTokenCase{"drelu 1 x 4096", 1, 4096, 5632, -80, true, true},
        FewTokenCase{"drelu 2 x 2048 all", 2, 2048, 9000, 127, true, true},
        FewTokenCase{"drelu 8", 8, 520, 17000, -30, true, true},
        FewTokenCase{"drelu 40", 40, 320, 1000, -20, true, true},
        FewTokenCase{"non gated 8 x 4096", 8, 4096, 2120, -100, false},
        FewTokenCase{"non gated all 5", 5, 3000, 4232, 127, false},
        FewTokenCase{"nothing fires 1", 1, 64, 264, -128},
        FewTokenCase{"nothing fires 50", 50, 64, 264, -128},
        FewTokenCase{"everything fires 1", 1, 64, 5640, 127},
        FewTokenCase{"everything fires 12", 12, 64, 264, 127},
        FewTokenCase{"everything fires 64", 64, 72, 1000, 127},
        FewTokenCase{"F past 65536 one", 1, 64, 70000, -12},
        FewTokenCase{"F past 65536", 20, 64, 70000, -18},
        FewTokenCase{"F past 65536 all fire", 40, 8, 70000, 127},
        FewTokenCase{"model 1", 1, 2048, 5632, -95}, FewTokenCase{"model 8", 8, 2048, 5632, -95},
        FewTokenCase{"model 16", 16, 2048, 5632, -95},
        FewTokenCase{"model 32", 32, 2048, 5632, -95},
        FewTokenCase{"model 64", 64, 2048, 5632, -95},
        FewTokenCase{"model dense", 5, 2048, 5632, 100},
        FewTokenCase{"sixty three", 63, 136, 1000, -10}, FewTokenCase{"fifty", 50, 520, 2048, -40},
        FewTokenCase{"wide x 57", 57, 12808, 648, -40},
        FewTokenCase{"everything fires 49", 49, 64, 5640, 127},
        FewTokenCase{"half fires 64", 64, 2048, 5632, 0},
        FewTokenCase{"two passes 20", 20, 72, 8192, -12},
        FewTokenCase{"two passes 8", 8, 72, 8192, -12},
        FewTokenCase{"half fires 8", 8, 2048, 5632, 0},
        FewTokenCase{"non gated 1", 1, 320, 1000, -25, false},
        FewTokenCase{"non gated 13", 13, 320, 1000, -25, false},
        FewTokenCase{"non gated 64", 64, 320, 1000, -25, false}),
    [](const testing::TestParamInfo<FewTokenCase>& test) {
      std::string name = test.param.name;
      for (char& c : name) {
        if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
      }
      return name;
    });

// Counts of active neurons around those at which the kernels switch code paths, in each run of 192
// neurons.
TEST(FewTokenFfnCuda, AnyNumberOfNeuronsMayFire) {
  TWELL_HOPPER_TEST();
  constexpr int64_t kEach = 192,
                    kCounts[] = {64, 0, 65, 1, 80, 81, 79, 128, 63, 129, 192, 16, 127, 17, 191};
  for (const auto& [tokens, width] :
       {std::pair<int64_t, int64_t>{64, 2048}, {33, 1600}, {9, 392}, {50, 1096}}) {
    FewTokenProblem problem({"", tokens, width, 5632, 20});
    for (int64_t n = 0; n < problem.spec.ffn; ++n) {
      if (n % kEach < kCounts[n / kEach % std::ssize(kCounts)]) continue;
      int8_t* row = problem.w_first.data() + n * width;
      std::fill(row, row + width, int8_t{0});
      row[0] = -1;
    }
    problem.device_first = upload(to_bf16s(problem.w_first));
    FewTokenWorkspace workspace(problem.spec.ffn);
    const auto want = problem.expected();
    expect_equal(problem.run(ctx, stream, workspace), want, width);
    expect_equal(problem.run(ctx, stream, workspace), want, width);
    EXPECT_EQ(download(problem.activity)[0].nnz, 2 * problem.nonzeros);
  }
}

// Back-to-back calls overlap by programmatic dependent launch and share one workspace.
template <class Run>
void expect_calls_in_a_graph_keep_apart(CudaContext& ctx, const CudaStream& stream,
                                        int64_t most_neurons,
                                        const std::vector<FewTokenCase>& cases, const Run& run) {
  std::vector<FewTokenProblem> problems(cases.begin(), cases.end());
  FewTokenWorkspace workspace(most_neurons);
  std::vector<DeviceBuffer<__nv_bfloat16>> outputs;
  for (const FewTokenProblem& p : problems) {
    outputs.push_back(poisoned<__nv_bfloat16>(p.spec.tokens * p.spec.width));
  }
  replay_as_graph(stream, 5, [&] {
    for (size_t i = 0; i < problems.size(); ++i) {
      BatchFfnCuda problem = problems[i].problem(outputs[i].data());
      problem.weights_are_constant = true;
      run(ctx, problem, workspace);
    }
  });
  for (size_t i = 0; i < problems.size(); ++i) {
    expect_equal(download(outputs[i]), problems[i].expected(), problems[i].spec.width);
    EXPECT_EQ(download(problems[i].activity)[0].nnz, 5 * problems[i].nonzeros);
  }
}

TEST(FewTokenFfnCuda, OverlappingCallsInAGraphKeepApart) {
  TWELL_HOPPER_TEST();
  expect_calls_in_a_graph_keep_apart(ctx, stream, 2048,
                                     {{"", 3, 512, 1000, -25},
                                      {"", 64, 320, 1000, -20},
                                      {"", 1, 512, 2048, 20},
                                      {"", 16, 320, 520, -25, false},
                                      {"", 40, 320, 1000, -20}},
                                     few_token_ffn_cuda);
}

TEST(FewTokenFfnCuda, OverlappingPortableBatchesInAGraphKeepApart) {
  TWELL_GPU_TEST();
  expect_calls_in_a_graph_keep_apart(ctx, stream, 2048,
                                     {{"", 3, 512, 1000, -25},
                                      {"", 32, 320, 1000, -20},
                                      {"", 1, 512, 2048, 20},
                                      {"", 16, 320, 520, -25, false},
                                      {"", 20, 320, 1000, -20}},
                                     portable_batch_ffn_cuda);
}

TEST(FewTokenFfnCuda, OverlappingStreamsInAGraphKeepApart) {
  TWELL_HOPPER_TEST();
  expect_calls_in_a_graph_keep_apart(ctx, stream, 2112,
                                     {{"", 3, 512, 1000, -25},
                                      {"", 8, 4096, 2112, -25},
                                      {"", 1, 512, 2048, 20},
                                      {"", 5, 320, 520, -25, false},
                                      {"", 2, 2056, 1000, -20}},
                                     row_stream_ffn_cuda);
}

// All values of a token of x have the same magnitude, a power of two, so that its norm is a sign
// times the norm's weight.
TEST(FewTokenFfnCuda, NormInFrontAndResidualBehind) {
  TWELL_GPU_TEST();
  for (const auto& [tokens, width] :
       {std::pair<int64_t, int64_t>{1, 72}, {5, 320}, {7, 3080}, {8, 4104}}) {
    FewTokenProblem problem({"", tokens, width, 264, -25});
    std::vector<int8_t> norm(static_cast<size_t>(width)), x(problem.x.size()), residual(x.size());
    for (size_t i = 0; i < norm.size(); ++i) norm[i] = static_cast<int8_t>(1 + i % 3);
    for (size_t i = 0; i < x.size(); ++i) {
      const int sign = problem.x[i] < 0 ? -1 : 1;
      x[i] = static_cast<int8_t>(sign * (1 << i / norm.size() % 3));
      problem.x[i] = static_cast<int8_t>(sign * norm[i % norm.size()]);
      residual[i] = static_cast<int8_t>(i % 7);
    }
    const auto device_x = upload(to_bf16s(x)), device_norm = upload(to_bf16s(norm)),
               y = upload(to_bf16s(residual));
    FewTokenWorkspace workspace(problem.spec.ffn);
    BatchFfnCuda layer = problem.problem(y.data());
    layer.x = device_x.data();
    layer.norm = device_norm.data();
    layer.add = true;
    if (ctx.compute_capability() == 90) {
      few_token_ffn_cuda(ctx, layer, workspace);
      stream.synchronize();
      expect_equal(download(y), problem.expected(residual), width);
      EXPECT_EQ(download(problem.activity)[0].nnz, problem.nonzeros);
    }
    if (ctx.compute_capability() == 90 && streams(problem.spec)) {
      const auto stream_y = upload(to_bf16s(residual));
      layer.y = stream_y.data();
      row_stream_ffn_cuda(ctx, layer, workspace);
      stream.synchronize();
      expect_equal(download(stream_y), problem.expected(residual), width);
    }
    const auto portable_y = upload(to_bf16s(residual));
    layer.y = portable_y.data();
    portable_rows_ffn_cuda(ctx, layer, workspace);
    stream.synchronize();
    expect_equal(download(portable_y), problem.expected(residual), width);
  }
}

// Regression: CTAs without columns, the last of a cluster in narrow layers, prefetched rows of
// negative length, 4 GiB each: 0.212 ms at D 320 against 0.021 ms at D 384.
TEST(FewTokenFfnCuda, NarrowLayersTakeNoLongerThanWiderOnes) {
  TWELL_HOPPER_TEST();
  const auto least_time = [&](int64_t width) {
    const FewTokenProblem problem(FewTokenCase{"", 16, width, 5632, 0});
    FewTokenWorkspace workspace(problem.spec.ffn);
    const auto y = poisoned<__nv_bfloat16>(16 * width);
    const CudaEvent begin(CudaEvent::Timing::kOn), end(CudaEvent::Timing::kOn);
    double least = 0.0;
    for (int i = 0; i < 30; ++i) {
      begin.record(stream.get());
      few_token_ffn_cuda(ctx, problem.problem(y.data()), workspace);
      end.record(stream.get());
      stream.synchronize();
      const double time = end.milliseconds_since(begin);
      least = i == 0 ? time : std::min(least, time);
    }
    return least;
  };
  EXPECT_LE(least_time(320), 3.0 * least_time(384));
}

TEST(FewTokenFfnCuda, NanInTheGateReachesItsTokenOnly) {
  TWELL_GPU_TEST();
  for (const int64_t tokens : {2, 20, 40}) {
    FewTokenProblem problem({"", tokens, 64, 264, -5});
    const auto want = problem.expected();
    const __nv_bfloat16 nan = __float2bfloat16(NAN);
    TWELL_CUDA_CHECK(
        cudaMemcpy(problem.device_x.data() + 64 + 3, &nan, sizeof(nan), cudaMemcpyHostToDevice));
    synchronize_default_stream();
    FewTokenWorkspace workspace(264);
    for (const FewTokenFfn ffn :
         {few_token_ffn_cuda, row_stream_ffn_cuda, portable_batch_ffn_cuda}) {
      if (ffn != portable_batch_ffn_cuda && ctx.compute_capability() != 90) continue;
      if (ffn == row_stream_ffn_cuda && !streams(problem.spec)) continue;
      if (ffn == portable_batch_ffn_cuda && tokens > kMaxPortableBatch) continue;
      const auto got = problem.run(ctx, stream, workspace, ffn);
      for (size_t i = 0; i < got.size(); ++i) {
        const float value = __bfloat162float(got[i]);
        if (i / 64 == 1) {
          EXPECT_TRUE(std::isnan(value)) << "column " << i % 64;
        } else {
          ASSERT_EQ(value, want[i]) << "element " << i;
        }
      }
    }
  }
}

TEST(FewTokenFfnCuda, PortableBatchRefusesWhatItCannotDo) {
  TWELL_GPU_TEST();
  BatchFfnCuda problem;
  problem.tokens = 33;
  problem.width = 64;
  problem.ffn = 256;
  FewTokenWorkspace workspace(256);
  EXPECT_THAT([&] { portable_batch_ffn_cuda(ctx, problem, workspace); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("[33, 256]")));
  problem.tokens = 4;
  const auto norm = upload(std::vector<__nv_bfloat16>(64));
  problem.norm = norm.data();
  EXPECT_THAT([&] { portable_batch_ffn_cuda(ctx, problem, workspace); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("with a norm")));
}

TEST(FewTokenFfnCuda, RefusesWhatItCannotDo) {
  TWELL_HOPPER_TEST();
  BatchFfnCuda problem;
  problem.tokens = 65;
  problem.width = 64;
  problem.ffn = 256;
  FewTokenWorkspace enough(256), small(128);
  EXPECT_THAT([&] { few_token_ffn_cuda(ctx, problem, enough); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("[65, 256]")));
  problem.tokens = 4;
  EXPECT_THROW(few_token_ffn_cuda(ctx, problem, small), Error);
  problem.tokens = 9;
  EXPECT_THAT([&] { row_stream_ffn_cuda(ctx, problem, enough); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("at most 8 tokens")));
  problem.tokens = 8;
  problem.width = 4104;
  EXPECT_THROW(row_stream_ffn_cuda(ctx, problem, enough), Error);
  problem.width = 256;
  FewTokenWorkspace narrow(256, 128);
  problem.ffn = 2112;
  EXPECT_THROW(row_stream_ffn_cuda(ctx, problem, narrow), Error);
  problem.ffn = 256;
  problem.width = 20;
  EXPECT_THAT([&] { few_token_ffn_cuda(ctx, problem, enough); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("width 20")));
}

}  // namespace
}  // namespace twell
