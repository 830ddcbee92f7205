// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/skinny/layer_ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"

namespace twell::layer_ops {
namespace {

using Floats = std::vector<float>;

size_t at(int64_t index) { return static_cast<size_t>(index); }

double rounded(double value) {
  return static_cast<double>(__bfloat162float(__float2bfloat16(static_cast<float>(value))));
}

// The RMS norm of x, rounded to bf16 as in the kernels.
Floats normalized(const Floats& x, const Floats& weight, int64_t tokens, int64_t width, float eps) {
  Floats result(x.size());
  for (int64_t m = 0; m < tokens; ++m) {
    double squares = 0.0;
    for (int64_t k = 0; k < width; ++k) squares += std::pow(x[at(m * width + k)], 2);
    const double inverse = 1.0 / std::sqrt(squares / static_cast<double>(width) + eps);
    for (int64_t k = 0; k < width; ++k) {
      result[at(m * width + k)] =
          static_cast<float>(rounded(x[at(m * width + k)] * inverse * weight[at(k)]));
    }
  }
  return result;
}

struct Products {
  std::vector<double> value, size;  // [M, N]: sums, and sums of magnitudes
};

// x [M, K] w [N, K]^T
Products products(const Floats& x, const Floats& w, int64_t tokens, int64_t cols, int64_t inner) {
  Products result{std::vector<double>(at(tokens * cols)), std::vector<double>(at(tokens * cols))};
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t n = 0; n < cols; ++n) {
      for (int64_t k = 0; k < inner; ++k) {
        const double term = static_cast<double>(x[at(m * inner + k)]) * w[at(n * inner + k)];
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

// Operands of a product after a norm. The norm may be off by one bf16 step where f32 and double
// round differently, which 2^-8 of the terms' magnitudes covers.
struct Operands {
  Shape shape;
  std::vector<__nv_bfloat16> x, norm;
  DeviceBuffer<__nv_bfloat16> device_x, device_norm;
  Floats normed;
  explicit Operands(const Shape& s)
      : shape(s),
        x(random_bf16(s.tokens * s.width, 1)),
        norm(random_bf16(s.width, 2)),
        device_x(upload(x)),
        device_norm(upload(norm)),
        normed(normalized(to_floats(x), to_floats(norm), s.tokens, s.width, 1e-5f)) {}
  Input input(bool with_norm) const {
    return {.tokens = shape.tokens,
            .width = shape.width,
            .x = device_x.data(),
            .norm = with_norm ? device_norm.data() : nullptr,
            .constant_weights = shape.tokens % 2 == 0};
  }
};

constexpr double kNormError = 1.0 / 256, kSumError = 1.0 / (1 << 20), kRounding = 1.0 / 256;

class LayerOpsCuda : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override { TWELL_SKIP_WITHOUT_GPU(); }
};

TEST_P(LayerOpsCuda, LinearWithNormAndResidual) {
  const auto [tokens, width, cols] = GetParam();
  const Operands operands(GetParam());
  const auto w = random_bf16(cols * width, 3), residual = random_bf16(tokens * cols, 4);
  const auto device_w = upload(w), device_residual = upload(residual);
  const auto y = poisoned<float>(tokens * cols);
  const CudaStream stream;
  for (const bool with_norm : {false, true}) {
    TWELL_CUDA_CHECK(launch_linear({.input = operands.input(with_norm),
                                    .cols = cols,
                                    .w = device_w.data(),
                                    .residual = device_residual.data(),
                                    .y = y.data(),
                                    .f32_out = true},
                                   stream.get()));
    stream.synchronize();
    const Products want = products(with_norm ? operands.normed : to_floats(operands.x),
                                   to_floats(w), tokens, cols, width);
    const Floats got = download(y), add = to_floats(residual);
    for (size_t i = 0; i < got.size(); ++i) {
      const double error = want.size[i] * (kSumError + (with_norm ? kNormError : 0.0));
      ASSERT_NEAR(got[i], want.value[i] + add[i], error + 1e-6) << i << " norm " << with_norm;
    }
  }
}

TEST_P(LayerOpsCuda, TokensDoNotDependOnEachOther) {
  const int64_t tokens = GetParam().tokens, width = GetParam().width, cols = GetParam().cols;
  const Operands operands(GetParam());
  const auto w = upload(random_bf16(cols * width, 3));
  const auto together = poisoned<float>(tokens * cols), apart = poisoned<float>(tokens * cols);
  const CudaStream stream;
  const auto run = [&](int64_t first, int64_t count, float* y) {
    Input input = operands.input(true);
    input.x += first * width;
    input.tokens = count;
    TWELL_CUDA_CHECK(launch_linear(
        {.input = input, .cols = cols, .w = w.data(), .y = y, .f32_out = true}, stream.get()));
  };
  run(0, tokens, together.data());
  for (int64_t m = 0; m < tokens; ++m) run(m, 1, apart.data() + m * cols);
  stream.synchronize();
  EXPECT_EQ(download(apart), download(together));
}

// h and the bounds of its errors, from the products of gate and up.
struct Hidden {
  std::vector<double> value, error;
};
Hidden hidden(const Products* gate, const Products& up, bool squared) {
  Hidden h{std::vector<double>(up.value.size()), std::vector<double>(up.value.size())};
  for (size_t i = 0; i < up.value.size(); ++i) {
    const double up_error = up.size[i] * (kSumError + kNormError);
    if (gate == nullptr) {
      const double g = std::max(up.value[i], 0.0), error = up_error + g * kRounding;
      h.value[i] = squared ? g * g : g;
      h.error[i] = squared ? (2.0 * g + error) * error + g * g * kRounding : error;
      continue;
    }
    const double g = std::max(gate->value[i], 0.0), f = squared ? g * g : g;
    const double gate_error = gate->size[i] * (kSumError + kNormError) + g * kRounding;
    const double f_error = squared ? (2.0 * g + gate_error) * gate_error : gate_error;
    h.value[i] = f * up.value[i];
    h.error[i] = f_error * (std::abs(up.value[i]) + up_error) + f * up_error +
                 std::abs(h.value[i]) * kRounding;
  }
  return h;
}

TEST_P(LayerOpsCuda, GateUp) {
  const auto [tokens, width, cols] = GetParam();
  const int64_t ffn = cols / 8 * 8;
  const Operands operands(GetParam());
  const auto w_gate = random_bf16(ffn * width, 5), w_up = random_bf16(ffn * width, 6);
  const auto device_gate = upload(w_gate), device_up = upload(w_up);
  const Products up = products(operands.normed, to_floats(w_up), tokens, ffn, width);
  const Products gate = products(operands.normed, to_floats(w_gate), tokens, ffn, width);
  const CudaStream stream;
  for (const int kind : {0, 1, 2, 3}) {
    const bool gated = kind % 2 == 1, squared = kind >= 2;
    const Hidden want = hidden(gated ? &gate : nullptr, up, squared);
    const auto h = poisoned<__nv_bfloat16>(tokens * ffn);
    const auto counts = upload(std::vector<ActivityCuda>(1));
    TWELL_CUDA_CHECK(launch_gate_up({.input = operands.input(true),
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
      ASSERT_NEAR(got[i], want.value[i], want.error[i] + 1e-6)
          << i / at(ffn) << ", " << i % at(ffn);
      nnz += got[i] != 0.0f;
    }
    const ActivityCuda count = download(counts)[0];
    EXPECT_EQ(count.tokens, static_cast<uint64_t>(tokens));
    EXPECT_EQ(count.nnz, nnz);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, LayerOpsCuda,
                         testing::Values(Shape{1, 8, 8}, Shape{1, 2048, 136}, Shape{2, 264, 264},
                                         Shape{3, 1000, 72}, Shape{5, 328, 40}, Shape{8, 512, 1016},
                                         Shape{8, 2560, 33}, Shape{4, 40, 257}, Shape{7, 96, 24}));

struct QkvCase {
  int64_t tokens, width, heads, kv_heads, head_dim;
  bool bias;
};
class LayerOpsQkvCuda : public testing::TestWithParam<QkvCase> {};

TEST_P(LayerOpsQkvCuda, RotatesAndFillsTheCache) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [tokens, width, heads, kv_heads, head_dim, with_bias] = GetParam();
  const int64_t half = head_dim / 2, cols = (heads + 2 * kv_heads) * head_dim, rows = 3 * tokens;
  const Operands operands({tokens, width, cols});
  const auto w = random_bf16(cols * width, 3), bias = random_bf16(cols, 4);
  const auto device_w = upload(w), device_bias = upload(bias);
  const int64_t max_positions = 50;
  Floats cos(at(max_positions * half)), sin(cos.size());
  for (int64_t i = 0; i < max_positions * half; ++i) {
    const double angle =
        static_cast<double>(i / half) *
        std::pow(10000.0, -static_cast<double>(i % half) / static_cast<double>(half));
    cos[at(i)] = static_cast<float>(std::cos(angle));
    sin[at(i)] = static_cast<float>(std::sin(angle));
  }
  std::vector<int32_t> positions;
  std::vector<int64_t> cache_rows;
  for (int64_t m = 0; m < tokens; ++m) {
    positions.push_back(static_cast<int32_t>((m * 17 + 3) % max_positions));
    cache_rows.push_back((m * 2 + 1) % rows);
  }
  const auto device_cos = upload(cos), device_sin = upload(sin);
  const auto device_positions = upload(positions);
  const auto device_rows = upload(cache_rows);
  const int64_t q_stride = cols;
  const auto q = poisoned<__nv_bfloat16>(tokens * q_stride);
  const auto keys = poisoned<__nv_bfloat16>(rows * kv_heads * head_dim),
             values = poisoned<__nv_bfloat16>(rows * kv_heads * head_dim);
  const CudaStream stream;
  TWELL_CUDA_CHECK(launch_qkv({.input = operands.input(true),
                               .heads = heads,
                               .kv_heads = kv_heads,
                               .head_dim = head_dim,
                               .w = device_w.data(),
                               .bias = with_bias ? device_bias.data() : nullptr,
                               .cos = device_cos.data(),
                               .sin = device_sin.data(),
                               .positions = device_positions.data(),
                               .cache_rows = device_rows.data(),
                               .q = q.data(),
                               .q_stride = q_stride,
                               .keys = keys.data(),
                               .values = values.data()},
                              stream.get()));
  stream.synchronize();
  Products want = products(operands.normed, to_floats(w), tokens, cols, width);
  const Floats bias_f = to_floats(bias);
  const Floats got_q = to_floats(download(q)), got_k = to_floats(download(keys)),
               got_v = to_floats(download(values));
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t head = 0; head < heads + 2 * kv_heads; ++head) {
      for (int64_t i = 0; i < half; ++i) {
        const int64_t low_at = head * head_dim + i, high_at = low_at + half;
        double low = want.value[at(m * cols + low_at)], high = want.value[at(m * cols + high_at)];
        if (with_bias) {
          low += bias_f[at(low_at)];
          high += bias_f[at(high_at)];
        }
        if (head < heads + kv_heads) {
          const int64_t entry = positions[at(m)] * half + i;
          const double c = cos[at(entry)], s = sin[at(entry)];
          const double rotated = low * c - high * s;
          high = high * c + low * s;
          low = rotated;
        }
        const double error =
            (want.size[at(m * cols + low_at)] + want.size[at(m * cols + high_at)]) *
            (kSumError + kNormError);
        double got_low = 0.0, got_high = 0.0;
        if (head < heads) {
          got_low = got_q[at(m * q_stride + low_at)];
          got_high = got_q[at(m * q_stride + high_at)];
        } else {
          const bool key = head < heads + kv_heads;
          const int64_t kv_head = head - heads - (key ? 0 : kv_heads);
          const int64_t to = (cache_rows[at(m)] * kv_heads + kv_head) * head_dim + i;
          got_low = (key ? got_k : got_v)[at(to)];
          got_high = (key ? got_k : got_v)[at(to + half)];
        }
        ASSERT_NEAR(got_low, low, error + std::abs(low) * kRounding)
            << m << " " << head << " " << i;
        ASSERT_NEAR(got_high, high, error + std::abs(high) * kRounding)
            << m << " " << head << " " << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, LayerOpsQkvCuda,
                         testing::Values(QkvCase{1, 64, 4, 4, 16, false},
                                         QkvCase{3, 136, 4, 2, 64, true},
                                         QkvCase{8, 256, 6, 1, 32, false},
                                         QkvCase{5, 2048, 2, 2, 128, true}));

}  // namespace
}  // namespace twell::layer_ops
