// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/screened/rotated_screen_cuda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"
#include "twell/ops/ffn/screened/rotated_screen_testing.h"
#include "twell/ops/rms_norm/rows_testing.h"

namespace twell {
namespace {

using namespace rotated_screen_testing;

// `count` rows, the given ones over and over.
std::vector<BF16> repeated(const std::vector<BF16>& rows, int64_t width, int64_t count) {
  std::vector<BF16> out;
  for (int64_t i = 0; i < count * width; ++i) {
    out.push_back(rows[static_cast<size_t>(i % std::ssize(rows))]);
  }
  return out;
}
const __nv_bfloat16* as_device(const DeviceBuffer<BF16>& values) {
  return reinterpret_cast<const __nv_bfloat16*>(values.data());
}

// What the device makes of the rows of a gate, and of tokens. Outputs are poisoned first, and a
// graph runs the launch twice.
Gate device_gate(const std::vector<BF16>& weights, int64_t width, ScreenBound bound,
                 const CudaStream& stream) {
  const int64_t neurons = std::ssize(weights) / width;
  const auto device_weights = upload(weights);
  const auto values = poisoned<int8_t>(neurons * width);
  const auto spread = poisoned<int32_t>((neurons + 255) / 256 * 256);
  const auto rounding = poisoned<float>(1);
  replay_as_graph(stream, 2, [&] {
    TWELL_CUDA_CHECK(launch_rotate_gate({.neurons = neurons,
                                         .width = width,
                                         .w_gate = as_device(device_weights),
                                         .values = values.data(),
                                         .spread = spread.data(),
                                         .rounding = rounding.data(),
                                         .bound = bound},
                                        stream.get()));
  });
  return {download(values), download(spread), download(rounding)[0]};
}
Rows device_rows(const std::vector<BF16>& x, int64_t width, ScreenBound bound, double rounding,
                 const CudaStream& stream) {
  const int64_t tokens = std::ssize(x) / width;
  const auto device_x = upload(x);
  const auto device_rounding = upload(std::vector<float>{static_cast<float>(rounding)});
  const auto values = poisoned<int8_t>(tokens * width);
  const auto bounds = poisoned<TokenBound>(tokens);
  replay_as_graph(stream, 2, [&] {
    TWELL_CUDA_CHECK(launch_rotate_rows({.tokens = tokens,
                                         .width = width,
                                         .x = as_device(device_x),
                                         .rotated = {values.data(), bounds.data()},
                                         .rounding = device_rounding.data(),
                                         .bound = bound},
                                        stream.get()));
  });
  return {download(values), download(bounds)};
}

// The reference's row with the device's values, which may differ by one where the f32 transform
// moves a value across a threshold of rounding.
QuantisedRow checked_row(const BF16* row, int64_t width, ScreenBound bound, bool of_gate,
                         const int8_t* values) {
  QuantisedRow want = quantised(rotated(row, width), rounding_of(bound, of_gate));
  const double off = 13 * 0x1p-24 * want.norm() + 1e-4;
  for (int64_t i = 0; i < width; ++i) {
    const auto at = static_cast<size_t>(i);
    const double up = bound == ScreenBound::kStrict ? 0.5 : screen_random(i, of_gate) * 0x1p-16;
    const double steps = want.steps[at] + up;
    if (values[i] != want.values[at] && std::fabs(steps - std::nearbyint(steps)) > off) {
      ADD_FAILURE() << "position " << i << ": " << int{values[i]} << " for " << want.steps[at];
      break;
    }
    want.values[at] = values[i];
  }
  return want;
}
// An integer that is the exact value rounded up, and at most 2% (and a little of a step) above.
void expect_bound(double got, double exact, const std::string& what) {
  EXPECT_GE(got, exact * (1 - 1e-7)) << what;
  EXPECT_LE(got, exact * 1.02 + 1.2) << what;
}

struct RotatedCase {
  int64_t width, rows;
  ScreenBound bound;
};
std::string rotated_case_name(const testing::TestParamInfo<RotatedCase>& info) {
  return std::to_string(info.param.width) + "x" + std::to_string(info.param.rows) +
         (info.param.bound == ScreenBound::kStrict ? "_strict" : "_probabilistic");
}
std::vector<RotatedCase> screen_cases() {
  std::vector<RotatedCase> cases;
  for (const ScreenBound bound : {ScreenBound::kStrict, ScreenBound::kProbabilistic}) {
    for (const int64_t width : {16, 48, 96, 240, 320, 512, 1008, 1024, 1280, 1536, 2048, 2560, 4096,
                                5120, 8192, 12288, 16384}) {
      cases.push_back({width, 57, bound});
      if (width <= 2048) cases.push_back({width, 1030, bound});
    }
    for (const int64_t rows : {1, 127, 129, 16385}) cases.push_back({2048, rows, bound});
    cases.push_back({4096, 1030, bound});
  }
  return cases;
}

class RotatedScreenCudaTest : public testing::TestWithParam<RotatedCase> {
 protected:
  static constexpr int64_t kDistinct = 2 * kHardKinds + 1;
};
INSTANTIATE_TEST_SUITE_P(Cases, RotatedScreenCudaTest, testing::ValuesIn(screen_cases()),
                         rotated_case_name);

TEST_P(RotatedScreenCudaTest, RowsAreTheReference) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [width, count, bound] = GetParam();
  const CudaStream stream;
  const std::vector<BF16> rows = hard_rows(std::min(count, kDistinct), width, 1);
  const int64_t distinct = std::ssize(rows) / width;
  const double rounding = bound == ScreenBound::kStrict ? 0.3 * std::sqrt(width) : 0.0;
  const Rows got = device_rows(repeated(rows, width, count), width, bound, rounding, stream);
  for (int64_t t = 0; t < count; ++t) {
    const int8_t* values = got.values.data() + t * width;
    const TokenBound token = got.bounds[static_cast<size_t>(t)];
    if (t >= distinct) {  // the same bits as the first of its kind
      const TokenBound first = got.bounds[static_cast<size_t>(t % distinct)];
      ASSERT_EQ(
          std::memcmp(values, got.values.data() + t % distinct * width, static_cast<size_t>(width)),
          0)
          << t;
      ASSERT_EQ(std::memcmp(&token, &first, sizeof(token)), 0) << t;
      continue;
    }
    const std::string what = "row " + std::to_string(t);
    const QuantisedRow row = checked_row(rows.data() + t * width, width, bound, false, values);
    const TokenBound want = token_bound(row, bound, static_cast<float>(rounding));
    if (row.kind != QuantisedRow::kTaken || want.base == kScreenMostBase) {
      EXPECT_EQ(token.base, want.base) << what;
      EXPECT_EQ(token.slope, want.slope) << what;
    } else {
      const ExactBound exact = exact_token_bound(row, bound, static_cast<float>(rounding));
      expect_bound(token.base, exact.base, what + ", base");
      expect_bound(token.slope, exact.slope, what + ", slope");
    }
  }
}

TEST_P(RotatedScreenCudaTest, GateIsTheReference) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [width, count, bound] = GetParam();
  const CudaStream stream;
  const std::vector<BF16> rows = hard_rows(std::min(count, kDistinct), width, 2);
  const int64_t distinct = std::ssize(rows) / width;
  const Gate got = device_gate(repeated(rows, width, count), width, bound, stream);
  double rounding = 0.0;
  for (int64_t n = 0; n < std::ssize(got.spread); ++n) {
    const int32_t spread = got.spread[static_cast<size_t>(n)];
    if (n >= count) {
      ASSERT_EQ(spread, 0) << n;
      continue;
    }
    const int8_t* values = got.values.data() + n * width;
    if (n >= distinct) {
      ASSERT_EQ(
          std::memcmp(values, got.values.data() + n % distinct * width, static_cast<size_t>(width)),
          0)
          << n;
      ASSERT_EQ(spread, got.spread[static_cast<size_t>(n % distinct)]) << n;
      continue;
    }
    const std::string what = "row " + std::to_string(n);
    const QuantisedRow row = checked_row(rows.data() + n * width, width, bound, true, values);
    if (row.kind == QuantisedRow::kTaken) {
      expect_bound(spread, exact_spread(row, bound), what);
      rounding = std::max(rounding, exact_gate_error(row));
    } else {
      EXPECT_EQ(spread, gate_spread(row, bound)) << what;
    }
  }
  if (bound == ScreenBound::kStrict) {
    EXPECT_GE(got.rounding, rounding * (1 - 1e-7));
    EXPECT_LE(got.rounding, rounding * 1.02);
  }
}

TEST_P(RotatedScreenCudaTest, NothingThatFiresIsMissed) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [width, count, bound] = GetParam();
  if (count == 16385) GTEST_SKIP() << "1030 rows run the same kernels";
  const CudaStream stream;
  const std::vector<BF16> weights = hard_rows(kDistinct, width, 3);
  std::vector<BF16> x = hard_rows(kDistinct, width, 4);
  // These rows mislead the strict bound, whose values do not depend on chance.
  for (const int64_t n : {0, 1, 10, 12}) {
    const std::vector<BF16> row = misleading_row(
        {weights.begin() + n * width, weights.begin() + (n + 1) * width}, ScreenBound::kStrict);
    x.insert(x.end(), row.begin(), row.end());
  }
  const int64_t tokens = std::ssize(x) / width;
  const Gate gate =
      device_gate(repeated(weights, width, std::max(count, kDistinct)), width, bound, stream);
  const Rows rows =
      device_rows(repeated(x, width, std::max(count, tokens)), width, bound, gate.rounding, stream);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t n = 0; n < kDistinct; ++n) {
      if (!fires(x.data() + t * width, weights.data() + n * width, width)) continue;
      EXPECT_TRUE(is_candidate(gate, n, rows, t, width)) << "token " << t << ", neuron " << n;
    }
  }
}

struct NormCase {
  int64_t tokens, width;
  bool residual;
};
class RotatedNormCudaTest : public testing::TestWithParam<NormCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, RotatedNormCudaTest,
                         testing::Values(NormCase{1, 16, true}, NormCase{3, 320, false},
                                         NormCase{129, 2048, true}, NormCase{1023, 2048, false},
                                         NormCase{1024, 512, true}, NormCase{1025, 1024, false},
                                         NormCase{1031, 1536, true}, NormCase{16385, 2048, true},
                                         NormCase{1025, 2048, false}, NormCase{1025, 1280, true},
                                         NormCase{1025, 48, false}, NormCase{127, 4096, true},
                                         NormCase{5, 5120, false}, NormCase{1030, 8192, true},
                                         NormCase{3, 12288, true}, NormCase{2, 16384, true}));

// y and sum have the bits of the norm alone, and rotated rows those of y's.
TEST_P(RotatedNormCudaTest, IsTheNormAndTheRotation) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [tokens, width, with_residual] = GetParam();
  const CudaStream stream;
  auto x = random_bf16(tokens * width, 1, 2.0f);
  if (tokens > 2) {  // a token of zeros, and one with a NaN
    for (int64_t i = 0; i < width; ++i) x[static_cast<size_t>(i)] = __float2bfloat16(0.0f);
    x[static_cast<size_t>(width + 5)] = __float2bfloat16(NAN);
  }
  const auto device_x = upload(x);
  auto residual = random_bf16(tokens * width, 2);
  for (int64_t i = 0; i < width; ++i) residual[static_cast<size_t>(i)] = __float2bfloat16(0.0f);
  const auto device_residual = upload(residual);
  const auto weight = upload(random_bf16(width, 3));
  const auto rounding = upload(std::vector<float>{0.3f * std::sqrt(static_cast<float>(width))});
  const auto rows = shuffled_rows(tokens);
  const auto device_rows = upload(rows);
  for (const auto& [bound, ordered] :
       {std::pair(ScreenBound::kStrict, false), std::pair(ScreenBound::kProbabilistic, false),
        std::pair(ScreenBound::kStrict, true), std::pair(ScreenBound::kProbabilistic, true)}) {
    std::vector<__nv_bfloat16> y[2], sum[2];
    std::vector<int8_t> values[2];
    std::vector<TokenBound> bounds[2];
    for (const bool together : {false, true}) {
      const auto device_sum = poisoned<__nv_bfloat16>(tokens * width);
      const auto device_y = poisoned<__nv_bfloat16>(tokens * width);
      const auto device_values = poisoned<int8_t>(tokens * width);
      const auto device_bounds = poisoned<TokenBound>(tokens);
      const RmsNormCuda norm{.tokens = tokens,
                             .width = width,
                             .x = device_x.data(),
                             .residual = with_residual ? device_residual.data() : nullptr,
                             .sum = device_sum.data(),
                             .weight = weight.data(),
                             .y = device_y.data(),
                             .y_rows = ordered ? device_rows.data() : nullptr};
      const RotatedRowsCuda rotated{device_values.data(), device_bounds.data()};
      if (together) {
        TWELL_CUDA_CHECK(launch_rotate_norm({norm, rotated, rounding.data(), bound}, stream.get()));
      } else {
        TWELL_CUDA_CHECK(launch_rms_norm(norm, stream.get()));
        TWELL_CUDA_CHECK(launch_rotate_rows(
            {tokens, width, device_y.data(), rotated, rounding.data(), bound}, stream.get()));
      }
      stream.synchronize();
      y[together] = download(device_y);
      sum[together] = download(device_sum);
      values[together] = download(device_values);
      bounds[together] = download(device_bounds);
    }
    const auto bytes = static_cast<size_t>(tokens * width) * sizeof(__nv_bfloat16);
    EXPECT_EQ(std::memcmp(y[0].data(), y[1].data(), bytes), 0);
    EXPECT_EQ(std::memcmp(sum[0].data(), sum[1].data(), bytes), 0);
    EXPECT_EQ(values[0], values[1]);
    EXPECT_EQ(
        std::memcmp(bounds[0].data(), bounds[1].data(), bounds[0].size() * sizeof(TokenBound)), 0);
    if (tokens > 2) {
      const auto row = [&](size_t token) {
        return ordered ? static_cast<size_t>(rows[token]) : token;
      };
      EXPECT_EQ(bounds[1][row(0)].base, -kScreenMostSpread - 1);
      EXPECT_EQ(bounds[1][row(1)].base, kScreenMostBase);
    }
  }
}

TEST(RotatedScreenCuda, RefusesWidths) {
  TWELL_SKIP_WITHOUT_GPU();
  for (const int64_t width : {int64_t{0}, int64_t{24}, kMaxRotatedWidth + 16}) {
    EXPECT_EQ(launch_rotate_gate({.neurons = 1, .width = width}, nullptr), cudaErrorInvalidValue);
    EXPECT_EQ(launch_rotate_rows({.tokens = 1, .width = width}, nullptr), cudaErrorInvalidValue);
    EXPECT_EQ(launch_rotate_norm({.norm = {.tokens = 1, .width = width}}, nullptr),
              cudaErrorInvalidValue);
  }
}

}  // namespace
}  // namespace twell
