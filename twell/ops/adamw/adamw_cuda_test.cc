// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/adamw/adamw_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "twell/base/cuda_gtest.h"
#include "twell/base/rng.h"
#include "twell/base/test_bf16.h"
#include "twell/ops/adamw/adamw.h"
#include "twell/ops/adamw/split_weight.h"

namespace twell {
namespace {

std::vector<float> random_floats(int64_t n, uint64_t stream) {
  std::vector<float> values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i) values[i] = normal(11, stream, i);
  return values;
}

// f32 weights on the device, in halves.
struct Weights {
  explicit Weights(const std::vector<float>& values) {
    std::vector<__nv_bfloat16> upper;
    std::vector<int16_t> lower;
    for (const float value : values) {
      const SplitWeight halves = split_weight(std::bit_cast<uint32_t>(value));
      upper.push_back(std::bit_cast<__nv_bfloat16>(halves.bf16));
      lower.push_back(halves.rest);
    }
    bf16 = upload(upper);
    rest = upload(lower);
  }
  std::vector<float> values() const {
    const auto upper = download(bf16);
    const auto lower = download(rest);
    std::vector<float> out;
    for (size_t i = 0; i < upper.size(); ++i) {
      out.push_back(
          std::bit_cast<float>(join_weight({std::bit_cast<uint16_t>(upper[i]), lower[i]})));
    }
    return out;
  }
  DeviceBuffer<__nv_bfloat16> bf16;
  DeviceBuffer<int16_t> rest;
};

GradientNorm norm_on_device(const CudaStream& stream, const DeviceBuffer<float>& grad,
                            double clip_norm, const DeviceBuffer<GradientNorm>& result) {
  const auto partial = poisoned<double>(std::max<int64_t>(1, gradient_norm_partials(grad.size())));
  TWELL_CUDA_CHECK(launch_gradient_norm(
      {grad.size(), grad.data(), clip_norm, partial.data(), result.data()}, stream.get()));
  stream.synchronize();
  return download(result)[0];
}

TEST(GradientNormCudaTest, EqualsCpu) {
  TWELL_SKIP_WITHOUT_GPU();
  const CudaStream stream;
  Context cpu(1);
  for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{127}, int64_t{16385}, int64_t{9000001}}) {
    const std::vector<float> grad = random_floats(n, 1);
    const double want = global_norm(cpu, grad);
    const auto device = upload(grad);
    const auto result = poisoned<GradientNorm>(1);
    const GradientNorm got = norm_on_device(stream, device, 1.0, result);
    EXPECT_NEAR(got.norm, want, 1e-12 * want) << n;
    EXPECT_FLOAT_EQ(got.clip_factor, want > 1.0 ? static_cast<float>(1.0 / want) : 1.0f) << n;
    const GradientNorm again = norm_on_device(stream, device, 0.0, result);
    EXPECT_EQ(again.norm, got.norm);
    EXPECT_EQ(again.clip_factor, 1.0f);
  }
}

TEST(GradientNormCudaTest, SaysWhatIsNotFinite) {
  TWELL_SKIP_WITHOUT_GPU();
  const CudaStream stream;
  const auto result = poisoned<GradientNorm>(1);
  const GradientNorm huge =
      norm_on_device(stream, upload(std::vector<float>(100, 3e38f)), 1.0, result);
  EXPECT_NEAR(huge.norm, 3e39, 1e33);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), INFINITY}) {
    std::vector<float> grad(70000, 1.0f);
    grad[69999] = bad;
    const GradientNorm got = norm_on_device(stream, upload(grad), 1.0, result);
    EXPECT_FALSE(std::isfinite(got.norm));
    EXPECT_TRUE(std::isnan(got.clip_factor));
  }
}

// Parameters with and without decay, and some that are left out, in runs that begin anywhere.
struct State {
  explicit State(int64_t n)
      : weight(random_floats(n, 2)),
        exp_avg(static_cast<size_t>(n)),
        exp_avg_sq(static_cast<size_t>(n)) {
    runs = {{0, true}};
    if (n > 100) runs.insert(runs.end(), {{37, false}, {61, true}, {64, false}, {n - 3, true}});
    // Runs that are left out begin and end within vectors and fill whole ones.
    if (n > 1000) {
      runs.insert(runs.end() - 1,
                  {{130, true, true}, {143, false}, {146, false, true}, {150, true}});
    }
  }
  void cpu_step(Context& ctx, AdamW options, std::vector<float>& grad) {
    const double decay = options.weight_decay;
    for (size_t r = 0; r < runs.size(); ++r) {
      if (runs[r].skip) continue;
      const auto begin = static_cast<size_t>(runs[r].begin);
      const size_t end =
          r + 1 < runs.size() ? static_cast<size_t>(runs[r + 1].begin) : weight.size();
      options.weight_decay = runs[r].decay ? decay : 0.0;
      const auto part = [&](std::vector<float>& of) {
        return std::span<float>(of).subspan(begin, end - begin);
      };
      adamw_step(ctx, options, {part(weight), part(grad), part(exp_avg), part(exp_avg_sq)});
    }
  }
  std::vector<float> weight, exp_avg, exp_avg_sq;
  std::vector<AdamWRun> runs;
};

class AdamWCudaTest : public testing::TestWithParam<int64_t> {};

TEST_P(AdamWCudaTest, EqualsCpuOverSteps) {
  TWELL_SKIP_WITHOUT_GPU();
  const int64_t n = GetParam();
  const CudaStream stream;
  Context cpu(1);
  State state(n);
  const Weights weight(state.weight);
  const auto exp_avg = upload(state.exp_avg), exp_avg_sq = upload(state.exp_avg_sq);
  const auto runs = upload(state.runs);
  const float clip = 0.37f;
  const auto device_clip = upload(std::vector<float>{clip});
  constexpr int kSteps = 5;
  for (int step = 1; step <= kSteps; ++step) {
    AdamW options{.learning_rate = 3e-3, .grad_scale = 0.5, .step = step};
    std::vector<float> grad = random_floats(n, static_cast<uint64_t>(10 + step));
    const auto coefficients = upload(std::vector<AdamWCoefficients>{adamw_coefficients(options)});
    const auto device_grad = upload(grad);
    TWELL_CUDA_CHECK(launch_adamw({.size = n,
                                   .runs = runs.data(),
                                   .run_count = runs.size(),
                                   .coefficients = coefficients.data(),
                                   .clip_factor = device_clip.data(),
                                   .grad = device_grad.data(),
                                   .weight = weight.bf16.data(),
                                   .weight_rest = weight.rest.data(),
                                   .exp_avg = exp_avg.data(),
                                   .exp_avg_sq = exp_avg_sq.data()},
                                  stream.get()));
    stream.synchronize();
    options.grad_scale *= static_cast<double>(clip);
    state.cpu_step(cpu, options, grad);
  }
  const auto got = weight.values(), got_m = download(exp_avg), got_v = download(exp_avg_sq);
  // Bit for bit if the CPU fuses multiplications and additions; otherwise a few roundings apart.
  const float ulps = 4.0f * kSteps * std::numeric_limits<float>::epsilon();
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], state.weight[i], ulps * std::max(1.0f, std::abs(state.weight[i]))) << i;
    ASSERT_NEAR(got_m[i], state.exp_avg[i], ulps) << i;
    ASSERT_NEAR(got_v[i], state.exp_avg_sq[i], ulps * state.exp_avg_sq[i]) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, AdamWCudaTest,
                         testing::Values(int64_t{1}, int64_t{127}, int64_t{129}, int64_t{1024},
                                         int64_t{70003}));

// bf16 moments are the f32 results, rounded as the CPU op rounds: one step from moments that bf16
// represents, of parameters in the middle of a model.
TEST(AdamWCudaTest, MomentsInBf16) {
  TWELL_SKIP_WITHOUT_GPU();
  const int64_t n = 1029;
  const CudaStream stream;
  const std::vector<float> grad = random_floats(n, 3), weight = random_floats(n, 4);
  const auto m = random_bf16(n, 5);
  auto v = random_bf16(n, 6);
  for (auto& value : v) value = __float2bfloat16(std::abs(__bfloat162float(value)));
  const auto runs = upload(std::vector<AdamWRun>{{0, true}});
  const auto coefficients =
      upload(std::vector<AdamWCoefficients>{adamw_coefficients(AdamW{.step = 7})});
  const auto device_grad = upload(grad);
  const Weights weight_a(weight), weight_b(weight);
  const auto m_f32 = upload(to_floats(m)), v_f32 = upload(to_floats(v));
  const auto m_bf16 = upload(m), v_bf16 = upload(v);
  constexpr int64_t kFirst = 64 * 1003;
  constexpr uint64_t kSeed = 11;
  AdamWCuda problem{.size = n,
                    .first = kFirst,
                    .seed = kSeed,
                    .runs = runs.data(),
                    .run_count = 1,
                    .coefficients = coefficients.data(),
                    .grad = device_grad.data(),
                    .weight = weight_a.bf16.data(),
                    .weight_rest = weight_a.rest.data(),
                    .exp_avg = m_f32.data(),
                    .exp_avg_sq = v_f32.data()};
  TWELL_CUDA_CHECK(launch_adamw(problem, stream.get()));
  problem.weight = weight_b.bf16.data();
  problem.weight_rest = weight_b.rest.data();
  problem.moments = MomentDType::kBF16;
  problem.exp_avg = m_bf16.data();
  problem.exp_avg_sq = v_bf16.data();
  TWELL_CUDA_CHECK(launch_adamw(problem, stream.get()));
  stream.synchronize();
  EXPECT_NE(weight_a.values(), weight);
  EXPECT_EQ(weight_a.values(), weight_b.values());
  const auto rounded = [&](const std::vector<float>& values, int shift) {
    std::vector<float> out;
    for (const float value : values) {
      const int64_t place = kFirst + std::ssize(out);
      const uint32_t random =
          rounding_bits(kSeed, 7, place / kRoundingGroup).word[place % kRoundingGroup] >> shift;
      out.push_back(
          std::bit_cast<float>(round_stochastically(std::bit_cast<uint32_t>(value), random)));
    }
    return out;
  };
  EXPECT_EQ(to_floats(download(m_bf16)), rounded(download(m_f32), 0));
  EXPECT_EQ(to_floats(download(v_bf16)), rounded(download(v_f32), 16));
}

// To nearest, v would stay at 1.
TEST(AdamWCudaTest, MomentsInBf16Decay) {
  TWELL_SKIP_WITHOUT_GPU();
  const int64_t n = 4099;
  constexpr int kSteps = 1000;
  const CudaStream stream;
  const Weights weight(random_floats(n, 4));
  const std::vector<__nv_bfloat16> ones(static_cast<size_t>(n), __float2bfloat16(1.0f));
  const auto m = upload(ones), v = upload(ones);
  const auto grad = upload(std::vector<float>(static_cast<size_t>(n), 0.0f));
  const auto runs = upload(std::vector<AdamWRun>{{0, true}});
  std::vector<AdamWCoefficients> steps;
  for (int step = 1; step <= kSteps; ++step) {
    steps.push_back(adamw_coefficients({.beta1 = 0.999, .beta2 = 0.999, .step = step}));
  }
  const auto coefficients = upload(steps);
  for (int step = 0; step < kSteps; ++step) {
    TWELL_CUDA_CHECK(launch_adamw({.size = n,
                                   .runs = runs.data(),
                                   .run_count = 1,
                                   .coefficients = coefficients.data() + step,
                                   .grad = grad.data(),
                                   .weight = weight.bf16.data(),
                                   .weight_rest = weight.rest.data(),
                                   .moments = MomentDType::kBF16,
                                   .exp_avg = m.data(),
                                   .exp_avg_sq = v.data()},
                                  stream.get()));
  }
  stream.synchronize();
  const double expected = std::pow(0.999, kSteps);
  for (const auto& moment : {to_floats(download(m)), to_floats(download(v))}) {
    double sum = 0.0;
    for (const float value : moment) sum += value;
    EXPECT_NEAR(sum / static_cast<double>(n), expected, 0.01 * expected);
  }
}

TEST(AdamWCudaTest, SkipsAStepThatIsNotFinite) {
  TWELL_SKIP_WITHOUT_GPU();
  const int64_t n = 129;
  const CudaStream stream;
  const std::vector<float> weight = random_floats(n, 1), moments = random_floats(n, 2);
  const Weights device_weight(weight);
  const auto m = upload(moments), v = upload(moments),
             clip = upload(std::vector<float>{std::numeric_limits<float>::quiet_NaN()}),
             grad = upload(std::vector<float>(static_cast<size_t>(n), NAN));
  const auto runs = upload(std::vector<AdamWRun>{{0, true}});
  const auto coefficients = upload(std::vector<AdamWCoefficients>{adamw_coefficients(AdamW{})});
  TWELL_CUDA_CHECK(launch_adamw({.size = n,
                                 .runs = runs.data(),
                                 .run_count = 1,
                                 .coefficients = coefficients.data(),
                                 .clip_factor = clip.data(),
                                 .grad = grad.data(),
                                 .weight = device_weight.bf16.data(),
                                 .weight_rest = device_weight.rest.data(),
                                 .exp_avg = m.data(),
                                 .exp_avg_sq = v.data()},
                                stream.get()));
  stream.synchronize();
  EXPECT_EQ(device_weight.values(), weight);
  EXPECT_EQ(download(m), moments);
  EXPECT_EQ(download(v), moments);
}

}  // namespace
}  // namespace twell
