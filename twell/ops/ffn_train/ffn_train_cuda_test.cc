// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn_train/ffn_train_cuda.h"

#include <gtest/gtest.h>

#include <array>
#include <barrier>
#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/base/cuda_testing.h"
#include "twell/base/rounding.h"
#include "twell/base/test_bf16.h"
#include "twell/ops/ffn_train/ffn_train_reference.h"

namespace twell {
namespace {

using reference::Problem;

// A problem in bf16 values in which token m has exactly row_nnz(m) < 16,384 active neurons. Numbers
// in two digits of base 128 are exact in bf16: the gate of a neuron is (row_nnz - rank - 0.5) / 64.
Problem make_bf16_problem(int64_t tokens, int64_t width, int64_t ffn, bool gated,
                          const std::function<int64_t(int64_t)>& row_nnz) {
  Problem p = {.tokens = tokens, .width = width, .ffn = ffn, .gated = gated};
  const auto fill = [](std::vector<double>& v, int64_t n, uint64_t stream, float scale) {
    const auto floats = to_floats(random_bf16(n, stream, scale));
    v.assign(floats.begin(), floats.end());
  };
  fill(p.x, tokens * width, 0, 1.0f);
  fill(p.d_y, tokens * width, 1, 1.0f);
  fill(p.w_up, ffn * width, 2, 0.3f);
  fill(p.w_down, ffn * width, 3, 0.3f);
  std::vector<double>& firing = gated ? p.w_gate : p.w_up;
  firing.assign(static_cast<size_t>(ffn * width), 0.0);
  for (int64_t m = 0; m < tokens; ++m) {
    const int64_t n = row_nnz(m);
    const double digits[4] = {1.0, 1.0, static_cast<double>(n / 128), static_cast<double>(n % 128)};
    for (int64_t k = 0; k < 4; ++k) p.x[reference::at(m, width, k)] = digits[k];
  }
  // A multiplier that shares no factor with F permutes the ranks.
  int64_t step = ffn / 3 + 1;
  while (std::gcd(step, ffn) != 1) ++step;
  for (int64_t j = 0; j < ffn; ++j) {
    const int64_t rank = j * step % ffn;
    const double factors[4] = {-128.0 * static_cast<double>(rank / 128),
                               -static_cast<double>(rank % 128) - 0.5, 128.0, 1.0};
    for (int64_t k = 0; k < 4; ++k) firing[reference::at(j, width, k)] = factors[k] / 64.0;
  }
  return p;
}

std::vector<__nv_bfloat16> to_bf16_values(const std::vector<double>& values) {
  std::vector<__nv_bfloat16> out;
  for (const double value : values) out.push_back(__double2bfloat16(value));
  return out;
}

// What a forward and a backward pass leave.
struct LayerResult {
  std::vector<float> y, d_x, d_w_gate, d_w_up, d_w_down, d_b_gate, d_b_up, d_b_down;
  std::vector<uint8_t> active;
  FfnTrainCountsCuda counts;
  bool operator==(const LayerResult& other) const {
    return y == other.y && d_x == other.d_x && d_w_gate == other.d_w_gate &&
           d_w_up == other.d_w_up && d_w_down == other.d_w_down && d_b_gate == other.d_b_gate &&
           d_b_up == other.d_b_up && d_b_down == other.d_b_down && active == other.active &&
           counts.l1_sum == other.counts.l1_sum;
  }
};

// One layer on the device, outputs poisoned, gradients added to kStart or written.
struct LayerCuda {
  static constexpr float kStart = 0.25f;

  LayerCuda(CudaContext& ctx_in, const Problem& problem_in)
      : ctx(ctx_in),
        problem(problem_in),
        shape{.max_tokens = problem.tokens,
              .width = problem.width,
              .ffn = problem.ffn,
              .gated = problem.gated,
              .biased = !problem.b_down.empty(),
              .activation = problem.f.kind,
              .portable = ctx_in.compute_capability() != 90},
        x(upload(to_bf16_values(problem.x))),
        d_y(upload(to_bf16_values(problem.d_y))),
        w_gate(upload(to_bf16_values(problem.w_gate))),
        w_up(upload(to_bf16_values(problem.w_up))),
        w_down(upload(to_bf16_values(problem.w_down))),
        b_gate(upload(to_bf16_values(in_places(problem.b_gate)))),
        b_up(upload(to_bf16_values(in_places(problem.b_up)))),
        b_down(upload(to_bf16_values(problem.b_down))),
        l1_scale(upload(std::vector<float>{static_cast<float>(problem.l1_scale)})),
        relu_share(upload(std::vector<float>{problem.f.relu_share})),
        saved(ctx, shape),
        workspace(ctx, shape) {
    reset();
  }

  void reset() {
    const std::vector<float> start(problem.w_up.size(), add ? kStart : std::nanf(""));
    y = poisoned<__nv_bfloat16>(x.size());
    d_x = poisoned<__nv_bfloat16>(x.size());
    d_w_gate = upload(problem.gated ? start : std::vector<float>());
    d_w_up = upload(start);
    d_w_down = upload(start);
    const auto biases = [](size_t n) { return upload(std::vector<float>(n, kStart)); };
    d_b_gate = biases(in_places(problem.b_gate).size());
    d_b_up = biases(in_places(problem.b_up).size());
    d_b_down = biases(problem.b_down.size());
    active = upload(std::vector<uint8_t>(static_cast<size_t>(problem.ffn)));
    counts = upload(std::vector<FfnTrainCountsCuda>(1));
  }
  FfnWeightsCuda weights() const {
    return {.w_gate = w_gate.data(),
            .w_up = w_up.data(),
            .w_down = w_down.data(),
            .activation = problem.f.kind,
            .b_gate = b_gate.data(),
            .b_up = b_up.data(),
            .b_down = b_down.data(),
            .threshold = problem.f.threshold};
  }
  const float* share() const { return problem.f.relu_share > 0.0f ? relu_share.data() : nullptr; }
  FfnTrainForwardCuda forward() const {
    return {.tokens = problem.tokens,
            .weights = weights(),
            .relu_share = share(),
            .x = x.data(),
            .y = y.data(),
            .counts = counts.data(),
            .active = active.data()};
  }
  FfnTrainBackwardCuda backward() const {
    return {.tokens = problem.tokens,
            .weights = weights(),
            .relu_share = share(),
            .x = x.data(),
            .d_y = d_y.data(),
            .l1_scale = l1_scale.data(),
            .d_x = d_x.data(),
            .grads = {d_w_gate.data(), d_w_up.data(), d_w_down.data(), add, d_b_gate.data(),
                      d_b_up.data(), d_b_down.data()}};
  }
  void enqueue() {
    ffn_train_forward_cuda(ctx, forward(), saved, workspace);
    ffn_train_backward_cuda(ctx, backward(), saved, workspace);
  }
  LayerResult result() const {
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
    return {to_floats(download(y)), to_floats(download(d_x)), download(d_w_gate),
            download(d_w_up),       download(d_w_down),       of_neurons(d_b_gate),
            of_neurons(d_b_up),     download(d_b_down),       download(active),
            download(counts)[0]};
  }
  // A bias has its neurons rounded up to a multiple of 8 places.
  static std::vector<double> in_places(std::vector<double> bias) {
    bias.resize(round_up(bias.size(), size_t{8}));
    return bias;
  }
  // Its gradient, to which 0 was added in places behind the neurons.
  std::vector<float> of_neurons(const DeviceBuffer<float>& gradient) const {
    std::vector<float> values = download(gradient);
    while (std::ssize(values) > problem.ffn) {
      EXPECT_EQ(values.back(), kStart);
      values.pop_back();
    }
    return values;
  }
  LayerResult run(FfnTrainExecution execution, double nnz, double union_neurons = -1.0) {
    reset();
    saved.prepare(ctx, execution, nnz, union_neurons);
    enqueue();
    return result();
  }

  CudaContext& ctx;
  Problem problem;
  FfnTrainShapeCuda shape;
  bool add = true;
  DeviceBuffer<__nv_bfloat16> x, d_y, w_gate, w_up, w_down, b_gate, b_up, b_down;
  DeviceBuffer<float> l1_scale, relu_share;
  FfnSavedCuda saved;
  FfnTrainWorkspaceCuda workspace;
  DeviceBuffer<__nv_bfloat16> y, d_x;
  DeviceBuffer<float> d_w_gate, d_w_up, d_w_down, d_b_gate, d_b_up, d_b_down;
  DeviceBuffer<uint8_t> active;
  DeviceBuffer<FfnTrainCountsCuda> counts;
};

// Every value is a sum of products whose factors were rounded to bf16 a few times on the way, by
// 2^-9 of their size each; d_x of a gated layer is rounded between its two products. f32 sums of n
// terms are far below.
void expect_near(const std::vector<float>& actual, const std::vector<reference::Tracked>& expected,
                 double start, const std::string& name) {
  ASSERT_EQ(actual.size(), expected.size()) << name;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double want = expected[i].value + start;
    const double bound = std::ldexp(6.0, -9) * expected[i].magnitude + std::ldexp(1.0, -20) * start;
    // Negated, so that NaN fails; the first failure says enough.
    if (!(std::abs(static_cast<double>(actual[i]) - want) <= bound)) {
      FAIL() << name << "[" << i << "] is " << actual[i] << ", expected " << want << " +- "
             << bound;
    }
  }
}

void expect_matches(const LayerResult& got, const Problem& p, const reference::Result& expected,
                    double start = LayerCuda::kStart) {
  expect_near(got.y, expected.y, 0, "y");
  expect_near(got.d_x, expected.d_x, 0, "d_x");
  expect_near(got.d_w_gate, expected.d_w_gate, start, "d_w_gate");
  expect_near(got.d_w_up, expected.d_w_up, start, "d_w_up");
  expect_near(got.d_w_down, expected.d_w_down, start, "d_w_down");
  const double kept = LayerCuda::kStart;  // biases are always added to
  expect_near(got.d_b_gate, expected.d_b_gate, kept, "d_b_gate");
  expect_near(got.d_b_up, expected.d_b_up, kept, "d_b_up");
  expect_near(got.d_b_down, expected.d_b_down, kept, "d_b_down");
  EXPECT_EQ(got.active, expected.active);
  int64_t nnz = 0, most = 0;
  for (const int64_t n : expected.row_nnz) {
    nnz += n;
    most = std::max(most, n);
  }
  EXPECT_EQ(static_cast<int64_t>(got.counts.nnz), nnz);
  EXPECT_EQ(static_cast<int64_t>(got.counts.tokens), p.tokens);
  EXPECT_EQ(got.counts.max_row_nnz, most);
  EXPECT_NEAR(got.counts.l1_sum, expected.l1_sum.value,
              std::ldexp(4.0, -9) * expected.l1_sum.magnitude);
}

// ||actual - expected|| / ||expected||
double relative_error(const std::vector<float>& actual,
                      const std::vector<reference::Tracked>& expected, double start) {
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double d = static_cast<double>(actual[i]) - start - expected[i].value;
    difference += d * d;
    size += expected[i].value * expected[i].value;
  }
  return size > 0.0 ? std::sqrt(difference / size) : std::sqrt(difference);
}

constexpr BlendedActivation kRelu2 = {.kind = Activation::kRelu2};
constexpr BlendedActivation kFatRelu = {.kind = Activation::kFatRelu, .threshold = 0.1f};

struct Case {
  std::string name;
  int64_t tokens, width, ffn;
  int64_t (*row_nnz)(int64_t m, int64_t ffn);  // active neurons of token m
  BlendedActivation f = {};
  bool biased = false;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

int64_t none(int64_t, int64_t) { return 0; }
int64_t all(int64_t, int64_t ffn) { return ffn; }
int64_t few(int64_t m, int64_t ffn) { return m % std::max<int64_t>(1, ffn / 16); }
int64_t one_full_row(int64_t m, int64_t ffn) { return m == 1 ? ffn : m % 5; }
int64_t third_full(int64_t m, int64_t ffn) { return m % 3 == 0 ? ffn : m % 7; }
int64_t heavy_start(int64_t m, int64_t ffn) { return m % 200 < 4 ? ffn - m % 3 : m % 9; }

double mean_nnz(const reference::Result& expected) {
  double sum = 0.0;
  for (const int64_t n : expected.row_nnz) sum += static_cast<double>(n);
  return sum / static_cast<double>(expected.row_nnz.size());
}

// The hybrid execution may be off by what the dense one is off, and a little by chance.
void expect_no_less_exact(const LayerResult& hybrid, const LayerResult& dense,
                          const reference::Result& expected) {
  const auto compare = [](const std::vector<float>& a, const std::vector<float>& b,
                          const std::vector<reference::Tracked>& want, double start,
                          const std::string& name) {
    EXPECT_LE(relative_error(a, want, start), 1.1 * relative_error(b, want, start) + 1e-4) << name;
  };
  compare(hybrid.y, dense.y, expected.y, 0.0, "y");
  compare(hybrid.d_x, dense.d_x, expected.d_x, 0.0, "d_x");
  const double start = LayerCuda::kStart;
  compare(hybrid.d_w_gate, dense.d_w_gate, expected.d_w_gate, start, "d_w_gate");
  compare(hybrid.d_w_up, dense.d_w_up, expected.d_w_up, start, "d_w_up");
  compare(hybrid.d_w_down, dense.d_w_down, expected.d_w_down, start, "d_w_down");
}

Problem problem_of(const Case& c, bool gated) {
  const auto row_nnz = [&](int64_t m) { return c.row_nnz(m, c.ffn); };
  Problem p = make_bf16_problem(c.tokens, c.width, c.ffn, gated, row_nnz);
  p.l1_scale = 0.25;
  p.f = c.f;
  // A neuron's u is far from 0, so that rounding does not change its sign.
  for (int64_t j = 0; j < c.ffn && c.f.is_drelu(); ++j) {
    p.w_up[reference::at(j, c.width, 0)] = j % 3 == 0 ? -32.0 : 32.0;
  }
  if (!c.biased) return p;
  // Multiples of 1/64, so that gates near 0 stay exact.
  for (int64_t j = 0; j < c.ffn; ++j) {
    if (gated) p.b_gate.push_back(static_cast<double>(j % 5 - 2) / 64.0);
    p.b_up.push_back(static_cast<double>(j % 7 - 3) / 64.0);
  }
  for (int64_t d = 0; d < c.width; ++d) p.b_down.push_back(static_cast<double>(d % 3) / 4.0);
  return p;
}

// NaN in a token reaches that token's whole result, and no other token. The gradients of the
// weights are sums over tokens, so that they are NaN and stop the run.
TEST(FfnTrainCudaNan, ReachesItsTokenAndTheGradients) {
  TWELL_SKIP_WITHOUT_GPU();
  const CudaStream stream;
  CudaContext ctx(stream.get());
  constexpr size_t kBad = 70;
  for (const bool gated : {true, false}) {
    const Case c{"nan", 130, 64, 264, few};
    Problem p = problem_of(c, gated);
    const reference::Result finite = reference::run(p);
    p.x[kBad * 64 + 5] = std::nan("");
    LayerCuda layer(ctx, p);
    for (const FfnTrainExecution execution :
         {FfnTrainExecution::kDense, FfnTrainExecution::kHybrid}) {
      const bool hybrid = execution == FfnTrainExecution::kHybrid;
      if (hybrid && !ffn_train_hybrid_unsupported(ctx, layer.shape).empty()) continue;
      SCOPED_TRACE(testing::Message() << (hybrid ? "hybrid" : "dense") << ", gated " << gated);
      const LayerResult got = layer.run(execution, hybrid ? mean_nnz(finite) : -1.0);
      for (size_t i = 0; i < got.y.size(); ++i) {
        if (i / 64 == kBad) {
          ASSERT_TRUE(std::isnan(got.y[i])) << i;
        } else {
          ASSERT_NEAR(got.y[i], finite.y[i].value, std::ldexp(6.0, -9) * finite.y[i].magnitude);
        }
      }
      EXPECT_EQ(got.counts.max_row_nnz, 264);
      EXPECT_TRUE(std::isnan(got.d_w_up[5]) && std::isnan(got.d_w_down[0]));
    }
  }
}

class FfnTrainCudaTest : public testing::TestWithParam<std::tuple<Case, bool>> {};

TEST_P(FfnTrainCudaTest, BothExecutionsMatchTheReference) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto& [c, gated] = GetParam();
  const Problem p = problem_of(c, gated);
  const reference::Result expected = reference::run(p);
  const CudaStream stream;
  CudaContext ctx(stream.get());
  LayerCuda layer(ctx, p);
  const LayerResult dense = layer.run(FfnTrainExecution::kDense, -1.0);
  {
    SCOPED_TRACE("dense");
    expect_matches(dense, p, expected);
    EXPECT_EQ(dense, layer.run(FfnTrainExecution::kDense, -1.0));
  }
  if (!ffn_train_hybrid_unsupported(ctx, layer.shape).empty()) GTEST_SKIP() << "dense only";
  const double nnz = mean_nnz(expected);
  for (const bool portable : {false, true}) {
    if (!portable && layer.shape.portable) continue;  // a GPU without Hopper's kernels
    SCOPED_TRACE(portable ? "portable hybrid" : "hybrid");
    layer.saved.shape.portable = portable;
    const LayerResult hybrid = layer.run(FfnTrainExecution::kHybrid, nnz);
    expect_matches(hybrid, p, expected);
    expect_no_less_exact(hybrid, dense, expected);
    EXPECT_EQ(hybrid, layer.run(FfnTrainExecution::kHybrid, nnz));
    // Whether what forward saw could be kept must not show.
    const LayerResult short_of_memory = layer.run(FfnTrainExecution::kHybrid, 0.0);
    EXPECT_EQ(hybrid, short_of_memory);
    if (nnz > 2.0) {
      EXPECT_GE(short_of_memory.counts.recomputed, 1);
    }
    EXPECT_EQ(hybrid, layer.run(FfnTrainExecution::kHybrid, nnz, /*union_neurons=*/1.0));
  }
}

TEST_P(FfnTrainCudaTest, WritesGradientsWhateverWasThere) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto& [c, gated] = GetParam();
  const Problem p = problem_of(c, gated);
  const reference::Result expected = reference::run(p);
  const CudaStream stream;
  CudaContext ctx(stream.get());
  LayerCuda layer(ctx, p);
  layer.add = false;
  const double nnz = mean_nnz(expected);
  expect_matches(layer.run(FfnTrainExecution::kDense, -1.0), p, expected, /*start=*/0.0);
  if (!ffn_train_hybrid_unsupported(ctx, layer.shape).empty()) GTEST_SKIP() << "dense only";
  for (const bool portable : {false, true}) {
    if (!portable && layer.shape.portable) continue;  // a GPU without Hopper's kernels
    SCOPED_TRACE(portable ? "portable hybrid" : "hybrid");
    layer.saved.shape.portable = portable;
    const LayerResult hybrid = layer.run(FfnTrainExecution::kHybrid, nnz);
    expect_matches(hybrid, p, expected, /*start=*/0.0);
    EXPECT_EQ(hybrid, layer.run(FfnTrainExecution::kHybrid, nnz));
  }
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
                        Case{"wide_ffn", 3, 24, 8200, few}, Case{"tiny", 5, 8, 8, few},
                        Case{"many_tokens", 6000, 72, 264, heavy_start},
                        Case{"two_chunks", 16385, 24, 136, few}),
        testing::Bool()),
    [](const auto& suite_info) {
      return std::get<0>(suite_info.param).name +
             (std::get<1>(suite_info.param) ? "_gated" : "_plain");
    });

INSTANTIATE_TEST_SUITE_P(Large, FfnTrainCudaTest,
                         testing::Combine(testing::Values(Case{"tokens_beyond_65536", 70000, 8, 72,
                                                               heavy_start}),
                                          testing::Bool()),
                         [](const auto& suite_info) {
                           return std::get<0>(suite_info.param).name +
                                  (std::get<1>(suite_info.param) ? "_gated" : "_plain");
                         });

INSTANTIATE_TEST_SUITE_P(
    Relu2, FfnTrainCudaTest,
    testing::Combine(testing::Values(Case{"one_token", 1, 16, 48, few, kRelu2},
                                     Case{"all_full", 129, 72, 328, all, kRelu2},
                                     Case{"few", 1000, 136, 584, few, kRelu2},
                                     Case{"third_full", 300, 264, 520, third_full, kRelu2},
                                     Case{"heavy_start", 1000, 64, 1032, heavy_start, kRelu2},
                                     Case{"two_chunks", 16385, 24, 136, few, kRelu2}),
                     testing::Bool()),
    [](const auto& suite_info) {
      return std::get<0>(suite_info.param).name +
             (std::get<1>(suite_info.param) ? "_gated" : "_plain");
    });

constexpr BlendedActivation of(Activation kind, float relu_share = 0.0f) {
  return {.kind = kind, .relu_share = relu_share};
}

// Few of these have a sparse execution; the test says so.
INSTANTIATE_TEST_SUITE_P(
    Activations, FfnTrainCudaTest,
    testing::Combine(
        testing::Values(Case{"silu", 129, 72, 328, few, of(Activation::kSilu)},
                        Case{"silu_one_token", 1, 16, 48, few, of(Activation::kSilu)},
                        Case{"silu_blend", 300, 72, 200, few, of(Activation::kSilu, 0.3f)},
                        Case{"gelu", 129, 72, 328, heavy_start, of(Activation::kGelu)},
                        Case{"gelu_blend", 127, 72, 83, few, of(Activation::kGelu, 0.75f)},
                        Case{"gelu_tanh", 129, 72, 328, few, of(Activation::kGeluTanh)},
                        Case{"quick_gelu", 129, 72, 121, few, of(Activation::kQuickGelu)},
                        Case{"fatrelu", 1000, 136, 584, few, kFatRelu},
                        Case{"fatrelu_full", 129, 72, 328, all, kFatRelu},
                        Case{"fatrelu_heavy", 1000, 64, 1032, heavy_start, kFatRelu},
                        Case{"odd_ffn", 129, 72, 331, third_full},
                        Case{"odd_ffn_tiny", 5, 8, 3, all},
                        Case{"odd_ffn_relu2", 300, 24, 1021, few, kRelu2},
                        Case{"biased", 300, 72, 328, few, {}, true},
                        Case{"biased_silu", 129, 72, 328, few, of(Activation::kSilu), true},
                        Case{"biased_odd", 129, 72, 331, few, {}, true},
                        Case{"biased_odd_silu", 130, 72, 5, few, of(Activation::kSilu), true},
                        Case{"biased_relu2", 129, 72, 328, heavy_start, kRelu2, true},
                        Case{"biased_fatrelu", 129, 72, 328, few, kFatRelu, true}),
        testing::Bool()),
    [](const auto& suite_info) {
      return std::get<0>(suite_info.param).name +
             (std::get<1>(suite_info.param) ? "_gated" : "_plain");
    });

INSTANTIATE_TEST_SUITE_P(
    DRelu, FfnTrainCudaTest,
    testing::Combine(testing::Values(Case{"few", 1000, 136, 584, few, of(Activation::kDRelu)},
                                     Case{"full", 129, 72, 328, all, of(Activation::kDRelu)},
                                     Case{"odd", 129, 72, 83, third_full, of(Activation::kDRelu)},
                                     Case{"biased", 129, 72, 328, few, of(Activation::kDRelu),
                                          true}),
                     testing::Values(true)),
    [](const auto& suite_info) { return std::get<0>(suite_info.param).name; });

TEST(FfnTrainCudaGraph, Replays) {
  TWELL_GPU_TEST();
  const Problem p = make_bf16_problem(700, 72, 520, true, [](int64_t m) { return m % 40; });
  LayerCuda layer(ctx, p);
  for (const FfnTrainExecution execution :
       {FfnTrainExecution::kDense, FfnTrainExecution::kHybrid}) {
    if (execution == FfnTrainExecution::kHybrid &&
        !ffn_train_hybrid_unsupported(ctx, layer.shape).empty()) {
      continue;
    }
    const LayerResult once = layer.run(execution, 20.0);
    layer.reset();
    replay_as_graph(stream, 1, [&] { layer.enqueue(); });
    EXPECT_EQ(once, layer.result());
  }
}

// Two contexts share the GPU, so that neither has all its CTAs resident. Weight gradients wait for
// pieces of the same neurons that other CTAs compute.
TEST(FfnTrainCudaContexts, TwoAtOnceGiveWhatEachGivesAlone) {
  TWELL_GPU_TEST();
  const Problem p = make_bf16_problem(3000, 256, 1032, true, [](int64_t m) { return m * 7 % 200; });
  LayerCuda layer(ctx, p);
  if (!ffn_train_hybrid_unsupported(ctx, layer.shape).empty()) {
    GTEST_SKIP() << "no hybrid execution on this GPU";
  }
  const LayerResult alone = layer.run(FfnTrainExecution::kHybrid, 200.0);
  std::barrier together(2);
  std::array<std::thread, 2> threads;
  for (std::thread& thread : threads) {
    thread = std::thread([&] {
      const CudaStream own;
      CudaContext context(own.get());
      LayerCuda mine(context, p);
      for (int i = 0; i < 20; ++i) {
        together.arrive_and_wait();
        EXPECT_EQ(mine.run(FfnTrainExecution::kHybrid, 200.0), alone);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Both executions count the unions; the hybrid one has tiles of their own for heavy tokens.
TEST(FfnTrainCudaCounts, Unions) {
  TWELL_GPU_TEST();
  // Active neurons are those of rank below row_nnz: a union is its longest row.
  const Problem p =
      make_bf16_problem(300, 64, 520, true, [](int64_t m) { return m / 128 * 7 + m % 5; });
  LayerCuda layer(ctx, p);
  const unsigned long long expected = (0 + 4) + (7 + 4) + (14 + 4);
  EXPECT_EQ(layer.run(FfnTrainExecution::kDense, -1.0).counts.union_neurons, expected);
  if (!ffn_train_hybrid_unsupported(ctx, layer.shape).empty()) return;
  EXPECT_EQ(layer.run(FfnTrainExecution::kHybrid, 20.0).counts.union_neurons, expected);
}

TEST(FfnTrainCudaContract, RefusesWhatDoesNotFit) {
  TWELL_GPU_TEST();
  const Problem p = make_bf16_problem(4, 8, 16, true, [](int64_t) { return 2; });
  LayerCuda layer(ctx, p);
  FfnTrainForwardCuda forward = layer.forward();
  forward.tokens = 5;
  EXPECT_THROW(ffn_train_forward_cuda(ctx, forward, layer.saved, layer.workspace), Error);
  forward = layer.forward();
  forward.weights.w_gate = nullptr;
  EXPECT_THROW(ffn_train_forward_cuda(ctx, forward, layer.saved, layer.workspace), Error);
  forward = layer.forward();
  forward.weights.b_down = layer.w_down.data();  // the layer was planned without biases
  EXPECT_THROW(ffn_train_forward_cuda(ctx, forward, layer.saved, layer.workspace), Error);
  // Nothing is saved yet.
  EXPECT_THROW(ffn_train_backward_cuda(ctx, layer.backward(), layer.saved, layer.workspace), Error);
}

TEST(FfnTrainCudaContract, BytesAreWhatIsAllocated) {
  TWELL_GPU_TEST();
  for (const bool gated : {true, false}) {
    const FfnTrainShapeCuda shape{1000, 64, 584, gated};
    FfnSavedCuda saved(ctx, shape);
    const int64_t dense = FfnSavedCuda::bytes_needed(shape, FfnTrainExecution::kDense, -1.0);
    EXPECT_EQ(saved.bytes(), dense);
    if (ffn_train_hybrid_unsupported(ctx, shape).empty()) {
      saved.prepare(ctx, FfnTrainExecution::kHybrid, 5.0);
      EXPECT_EQ(saved.bytes(), FfnSavedCuda::bytes_needed(shape, FfnTrainExecution::kHybrid, 5.0));
      EXPECT_LE(saved.bytes(), dense);
      const int64_t any_union = saved.bytes();
      saved.prepare(ctx, FfnTrainExecution::kHybrid, 5.0, 30.0);
      EXPECT_LT(saved.bytes(), any_union);
    }
    const FfnTrainWorkspaceCuda workspace(ctx, shape);
    EXPECT_EQ(workspace.bytes, FfnTrainWorkspaceCuda::bytes_needed(ctx, shape));
    EXPECT_LE(FfnTrainWorkspaceCuda::bytes_needed(ctx, shape, /*hybrid=*/false), workspace.bytes);
  }
}

}  // namespace
}  // namespace twell
