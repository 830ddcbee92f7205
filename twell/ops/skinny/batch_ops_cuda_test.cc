// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/skinny/batch_ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"

namespace twell::batch_ops {
namespace {

using Floats = std::vector<float>;

size_t at(int64_t index) { return static_cast<size_t>(index); }

// Sums of products in double, and sums of their magnitudes.
struct Products {
  std::vector<double> value, size;  // [M, N]
};

// x [M, K] w^T, w [N, K]; or x w, w [K, N].
Products products(const Floats& x, const Floats& w, int64_t tokens, int64_t cols, int64_t inner,
                  bool down = false) {
  Products result{std::vector<double>(at(tokens * cols)), std::vector<double>(at(tokens * cols))};
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t n = 0; n < cols; ++n) {
      for (int64_t k = 0; k < inner; ++k) {
        const double term =
            static_cast<double>(x[at(m * inner + k)]) * w[at(down ? k * cols + n : n * inner + k)];
        result.value[at(m * cols + n)] += term;
        result.size[at(m * cols + n)] += std::abs(term);
      }
    }
  }
  return result;
}

struct Shape {
  int64_t tokens, width, cols;
};

constexpr double kSumError = 1.0 / (1 << 20), kRounding = 1.0 / 256;

class BatchOpsCuda : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    TWELL_SKIP_WITHOUT_GPU();
    CudaContext ctx(nullptr);
    if (ctx.compute_capability() != 90) GTEST_SKIP() << "needs a Hopper GPU";
  }
};

Input input_of(const Shape& shape, const DeviceBuffer<__nv_bfloat16>& x) {
  return {.tokens = shape.tokens,
          .width = shape.width,
          .x = x.data(),
          .constant_weights = shape.tokens % 2 == 0};
}

TEST_P(BatchOpsCuda, LinearWithResidual) {
  const auto [tokens, width, cols] = GetParam();
  const auto x = random_bf16(tokens * width, 1), w = random_bf16(cols * width, 2),
             residual = random_bf16(tokens * cols, 3);
  const auto device_x = upload(x), device_w = upload(w);
  const Products want = products(to_floats(x), to_floats(w), tokens, cols, width);
  const Floats add = to_floats(residual);
  const CudaStream stream;
  const auto y = poisoned<float>(tokens * cols);
  const auto sum = upload(residual);
  const Input input = input_of(GetParam(), device_x);
  TWELL_CUDA_CHECK(launch_linear(
      {.input = input, .cols = cols, .w = device_w.data(), .y = y.data(), .f32_out = true},
      stream.get()));
  TWELL_CUDA_CHECK(launch_linear(
      {.input = input, .cols = cols, .w = device_w.data(), .residual = sum.data(), .y = sum.data()},
      stream.get()));
  stream.synchronize();
  const Floats got = download(y), added = to_floats(download(sum));
  for (size_t i = 0; i < got.size(); ++i) {
    const double error = want.size[i] * kSumError + 1e-6;
    ASSERT_NEAR(got[i], want.value[i], error) << i;
    const double total = want.value[i] + add[i];
    ASSERT_NEAR(added[i], total, error + std::abs(total) * kRounding) << i;
  }
}

TEST_P(BatchOpsCuda, Down) {
  const auto [tokens, width, cols] = GetParam();
  const int64_t out = cols / 8 * 8;
  const auto h = random_bf16(tokens * width, 4), w = random_bf16(width * out, 5);
  const auto device_h = upload(h), device_w = upload(w);
  const Products want = products(to_floats(h), to_floats(w), tokens, out, width, true);
  const CudaStream stream;
  const auto y = poisoned<__nv_bfloat16>(tokens * out);
  TWELL_CUDA_CHECK(launch_down(
      {.input = input_of(GetParam(), device_h), .cols = out, .w = device_w.data(), .y = y.data()},
      stream.get()));
  stream.synchronize();
  const Floats got = to_floats(download(y));
  for (size_t i = 0; i < got.size(); ++i) {
    const double error = want.size[i] * kSumError + std::abs(want.value[i]) * kRounding + 1e-6;
    ASSERT_NEAR(got[i], want.value[i], error) << i;
  }
}

TEST_P(BatchOpsCuda, GateUp) {
  const auto [tokens, width, ffn] = GetParam();
  const auto x = random_bf16(tokens * width, 6), w_gate = random_bf16(ffn * width, 7),
             w_up = random_bf16(ffn * width, 8);
  const auto device_x = upload(x), device_gate = upload(w_gate), device_up = upload(w_up);
  const Products gate = products(to_floats(x), to_floats(w_gate), tokens, ffn, width);
  const Products up = products(to_floats(x), to_floats(w_up), tokens, ffn, width);
  const CudaStream stream;
  for (const int kind : {0, 1, 2, 3}) {
    const bool gated = kind % 2 == 0, squared = kind >= 2;
    const auto h = poisoned<__nv_bfloat16>(tokens * ffn);
    const auto counts = upload(std::vector<ActivityCuda>(1));
    const Input input = input_of(GetParam(), device_x);
    TWELL_CUDA_CHECK(launch_gate_up({.input = input,
                                     .ffn = ffn,
                                     .w_gate = gated ? device_gate.data() : nullptr,
                                     .w_up = device_up.data(),
                                     .h = h.data(),
                                     .squared = squared,
                                     .activity = counts.data()},
                                    stream.get()));
    stream.synchronize();
    const Floats got = to_floats(download(h));
    uint64_t nnz = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const Products& firing = gated ? gate : up;
      const double g = std::max(firing.value[i], 0.0), g_error = firing.size[i] * kSumError;
      const double f = squared ? g * g : g;
      const double f_error = squared ? (2.0 * g + g_error) * g_error : g_error;
      const double u = gated ? up.value[i] : 1.0;
      const double up_error = gated ? up.size[i] * kSumError : 0.0;
      const double error =
          f_error * (std::abs(u) + up_error) + f * up_error + std::abs(f * u) * kRounding;
      ASSERT_NEAR(got[i], f * u, error + 1e-6) << i / at(ffn) << ", " << i % at(ffn);
      nnz += got[i] != 0.0f;
    }
    const ActivityCuda count = download(counts)[0];
    EXPECT_EQ(count.tokens, static_cast<uint64_t>(tokens));
    EXPECT_EQ(count.nnz, nnz);
  }
}

TEST_P(BatchOpsCuda, TokensDoNotDependOnEachOther) {
  const auto [tokens, width, cols] = GetParam();
  const auto x = upload(random_bf16(tokens * width, 1)), w = upload(random_bf16(cols * width, 2));
  const auto together = poisoned<float>(tokens * cols), apart = poisoned<float>(tokens * cols);
  const CudaStream stream;
  const auto run = [&](int64_t first, int64_t count, float* y) {
    TWELL_CUDA_CHECK(
        launch_linear({.input = {.tokens = count, .width = width, .x = x.data() + first * width},
                       .cols = cols,
                       .w = w.data(),
                       .y = y,
                       .f32_out = true},
                      stream.get()));
  };
  run(0, tokens, together.data());
  for (int64_t m = 0; m < tokens; ++m) run(m, 1, apart.data() + m * cols);
  stream.synchronize();
  EXPECT_EQ(download(apart), download(together));
}

INSTANTIATE_TEST_SUITE_P(Shapes, BatchOpsCuda,
                         testing::Values(Shape{1, 8, 8}, Shape{9, 64, 64}, Shape{17, 72, 136},
                                         Shape{33, 1000, 40}, Shape{64, 512, 1016},
                                         Shape{63, 2048, 72}, Shape{64, 264, 264},
                                         Shape{12, 5632, 128}));

// Queries, keys and values of grouped heads, with bias; tokens go to cache rows in reverse.
TEST_F(BatchOpsCuda, Qkv) {
  const CudaStream stream;
  for (const int64_t head_dim : {64, 128, 256}) {
    const int64_t tokens = 21, width = 200, heads = 4, kv_heads = 2, half = head_dim / 2;
    const int64_t cols = (heads + 2 * kv_heads) * head_dim, positions = 50;
    const auto x = random_bf16(tokens * width, 1), w = random_bf16(cols * width, 2),
               bias = random_bf16(cols, 3);
    Floats cosines, sines;
    for (int64_t i = 0; i < positions * half; ++i) {
      cosines.push_back(static_cast<float>(std::cos(0.3 * static_cast<double>(i))));
      sines.push_back(static_cast<float>(std::sin(0.3 * static_cast<double>(i))));
    }
    std::vector<int32_t> place;
    std::vector<int64_t> rows;
    for (int64_t m = 0; m < tokens; ++m) {
      place.push_back(static_cast<int32_t>(m * 7 % positions));
      rows.push_back(tokens - 1 - m);
    }
    const auto device_x = upload(x), device_w = upload(w), device_bias = upload(bias);
    const auto device_cos = upload(cosines), device_sin = upload(sines);
    const auto device_place = upload(place);
    const auto device_rows = upload(rows);
    const auto q = poisoned<__nv_bfloat16>(tokens * cols),
               keys = poisoned<__nv_bfloat16>(tokens * kv_heads * head_dim),
               values = poisoned<__nv_bfloat16>(tokens * kv_heads * head_dim);
    TWELL_CUDA_CHECK(launch_qkv({.input = {.tokens = tokens, .width = width, .x = device_x.data()},
                                 .heads = heads,
                                 .kv_heads = kv_heads,
                                 .head_dim = head_dim,
                                 .w = device_w.data(),
                                 .bias = device_bias.data(),
                                 .cos = device_cos.data(),
                                 .sin = device_sin.data(),
                                 .positions = device_place.data(),
                                 .cache_rows = device_rows.data(),
                                 .q = q.data(),
                                 .q_stride = cols,
                                 .keys = keys.data(),
                                 .values = values.data()},
                                stream.get()));
    stream.synchronize();
    const Products sums = products(to_floats(x), to_floats(w), tokens, cols, width);
    const Floats got_q = to_floats(download(q)), got_k = to_floats(download(keys)),
                 got_v = to_floats(download(values)), add = to_floats(bias);
    for (int64_t m = 0; m < tokens; ++m) {
      for (int64_t n = 0; n < cols; ++n) {
        const int64_t head = n / head_dim, i = n % head_dim, pair = i % half;
        const auto sum = [&](int64_t column) {
          return sums.value[at(m * cols + column)] + add[at(column)];
        };
        const double low = sum(head * head_dim + pair), high = sum(head * head_dim + half + pair);
        const int64_t angle = place[at(m)] * half + pair;
        const double c = cosines[at(angle)], s = sines[at(angle)];
        double want = i < half ? low * c - high * s : high * c + low * s;
        float got;
        if (head < heads) {
          got = got_q[at(m * cols + n)];
        } else {
          const bool key = head < heads + kv_heads;
          if (!key) want = sum(n);
          const int64_t of_cache = head - heads - (key ? 0 : kv_heads);
          got = (key ? got_k : got_v)[at((rows[at(m)] * kv_heads + of_cache) * head_dim + i)];
        }
        const double size = sums.size[at(m * cols + head * head_dim + pair)] +
                            sums.size[at(m * cols + head * head_dim + half + pair)];
        ASSERT_NEAR(got, want, size * kSumError * 4 + std::abs(want) * kRounding + 1e-5)
            << "token " << m << " column " << n << " head size " << head_dim;
      }
    }
  }
}

TEST_F(BatchOpsCuda, NanReachesItsTokenAlone) {
  const int64_t tokens = 10, width = 128, cols = 64;
  auto x = random_bf16(tokens * width, 1);
  x[at(3 * width + 5)] = __float2bfloat16(std::numeric_limits<float>::quiet_NaN());
  const auto device_x = upload(x), w = upload(random_bf16(cols * width, 2));
  const auto h = poisoned<__nv_bfloat16>(tokens * cols);
  const CudaStream stream;
  TWELL_CUDA_CHECK(
      launch_gate_up({.input = {.tokens = tokens, .width = width, .x = device_x.data()},
                      .ffn = cols,
                      .w_gate = w.data(),
                      .w_up = w.data(),
                      .h = h.data()},
                     stream.get()));
  stream.synchronize();
  const Floats got = to_floats(download(h));
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(std::isnan(got[i]), i / at(cols) == 3) << i;
}

TEST_F(BatchOpsCuda, RefusesOtherShapes) {
  const CudaStream stream;
  EXPECT_EQ(launch_linear({.input = {.tokens = 65, .width = 64}, .cols = 64}, stream.get()),
            cudaErrorInvalidValue);
  EXPECT_EQ(launch_linear({.input = {.tokens = 9, .width = 68}, .cols = 64}, stream.get()),
            cudaErrorInvalidValue);
  EXPECT_EQ(launch_down({.input = {.tokens = 9, .width = 64}, .cols = 60}, stream.get()),
            cudaErrorInvalidValue);
  const DeviceBuffer<__nv_bfloat16> norm(64);
  EXPECT_EQ(launch_linear({.input = {.tokens = 9, .width = 64, .norm = norm.data()}, .cols = 64},
                          stream.get()),
            cudaErrorInvalidValue);
  EXPECT_FALSE(takes(Qkv{.input = {.tokens = 9, .width = 64}, .head_dim = 96}));
}

// Operands in e4m3 against sums of what their bytes stand for.
struct BytesOnDevice {
  BytesOnDevice(int64_t rows, int64_t cols, uint64_t stream, float scale) {
    Floats values = to_floats(random_bf16(rows * cols, stream, scale));
    // Rows of different sizes show a scale that is applied to another one.
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = std::ldexp(values[i], static_cast<int>(i / at(cols) % 5) - 2);
    }
    host = quantise_rows(ByteType::kE4M3, ConstMatrixF(values.data(), rows, cols));
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t col = 0; col < cols; ++col) wide.push_back(host.view().at(row, col));
    }
    bytes = upload(host.values);
    scales = upload(host.scales);
  }
  ByteRowsCuda view() const { return {bytes.data(), scales.data()}; }
  OwnedByteMatrix host;
  Floats wide;
  DeviceBuffer<uint8_t> bytes;
  DeviceBuffer<float> scales;
};
// The tensor cores add with at least 13 bits of mantissa.
constexpr double kByteSumError = 1.0 / (1 << 12);

TEST(BatchOpsBytesCuda, LinearEqualsTheProduct) {
  TWELL_HOPPER_TEST();
  for (const auto& [tokens, width, cols] :
       {Shape{1, 64, 64}, Shape{7, 272, 72}, Shape{33, 2048, 1000}, Shape{64, 5632, 328}}) {
    SCOPED_TRACE(testing::Message() << tokens << " x " << width << " x " << cols);
    const BytesOnDevice x(tokens, width, 1, 1.0f), w(cols, width, 2, 0.05f);
    const auto residual = random_bf16(tokens * cols, 3);
    const auto y = upload(residual);
    TWELL_CUDA_CHECK(launch_linear({.input = {.tokens = tokens,
                                              .width = width,
                                              .constant_weights = tokens % 2 == 1,
                                              .x_bytes = x.view()},
                                    .cols = cols,
                                    .residual = y.data(),
                                    .y = y.data(),
                                    .w_bytes = w.view()},
                                   stream.get()));
    stream.synchronize();
    const Floats got = to_floats(download(y)), before = to_floats(residual);
    const Products want = products(x.wide, w.wide, tokens, cols, width);
    for (size_t i = 0; i < got.size(); ++i) {
      const double value = want.value[i] + before[i];
      ASSERT_NEAR(got[i], value, std::abs(value) * kRounding + want.size[i] * kByteSumError) << i;
    }
  }
}

TEST(BatchOpsBytesCuda, GateUpEqualsTheProducts) {
  TWELL_HOPPER_TEST();
  for (const bool gated : {true, false}) {
    for (const auto& [tokens, width, ffn] :
         {Shape{1, 64, 48}, Shape{9, 528, 304}, Shape{64, 2048, 400}}) {
      SCOPED_TRACE(testing::Message() << gated << ": " << tokens << " x " << width << " x " << ffn);
      const BytesOnDevice x(tokens, width, 1, 1.0f), gate(ffn, width, 2, 0.05f),
          up(ffn, width, 3, 0.05f);
      const auto h = poisoned<__nv_bfloat16>(tokens * ffn);
      TWELL_CUDA_CHECK(launch_gate_up({.input = {.tokens = tokens,
                                                 .width = width,
                                                 .constant_weights = tokens % 2 == 1,
                                                 .x_bytes = x.view()},
                                       .ffn = ffn,
                                       .h = h.data(),
                                       .gate_bytes = gated ? gate.view() : ByteRowsCuda{},
                                       .up_bytes = up.view()},
                                      stream.get()));
      stream.synchronize();
      const Floats got = to_floats(download(h));
      const Products g = products(x.wide, gate.wide, tokens, ffn, width),
                     u = products(x.wide, up.wide, tokens, ffn, width);
      for (size_t i = 0; i < got.size(); ++i) {
        const double of_u = u.size[i] * kByteSumError, of_g = g.size[i] * kByteSumError;
        const double value =
            gated ? std::max(g.value[i], 0.0) * u.value[i] : std::max(u.value[i], 0.0);
        const double error =
            gated ? of_g * (std::abs(u.value[i]) + of_u) + std::max(g.value[i], 0.0) * of_u : of_u;
        ASSERT_NEAR(got[i], value, std::abs(value) * kRounding + error) << i;
      }
    }
  }
}

}  // namespace
}  // namespace twell::batch_ops
