// SPDX-License-Identifier: Apache-2.0
#include "bench/dense_8bit_cuda.h"

#include <cuda_fp8.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"

namespace twell {
namespace {

using Doubles = std::vector<double>;

// Row-major values on the host.
struct HostMatrix {
  int64_t rows = 0, cols = 0;
  Doubles values;

  double* row(int64_t m) { return values.data() + m * cols; }
  const double* row(int64_t m) const { return values.data() + m * cols; }
};

HostMatrix host_matrix(const std::vector<__nv_bfloat16>& values, int64_t rows, int64_t cols) {
  HostMatrix matrix{rows, cols, Doubles(values.size())};
  std::ranges::transform(values, matrix.values.begin(),
                         [](__nv_bfloat16 v) { return double{__bfloat162float(v)}; });
  return matrix;
}

HostMatrix transposed(const HostMatrix& a) {
  HostMatrix out{a.cols, a.rows, Doubles(a.values.size())};
  for (int64_t m = 0; m < a.rows; ++m) {
    for (int64_t n = 0; n < a.cols; ++n) out.row(n)[m] = a.row(m)[n];
  }
  return out;
}

// a [M, K] b [N, K]^T
HostMatrix product(const HostMatrix& a, const HostMatrix& b) {
  HostMatrix out{a.rows, b.rows, Doubles(static_cast<size_t>(a.rows * b.rows))};
  for (int64_t m = 0; m < a.rows; ++m) {
    for (int64_t n = 0; n < b.rows; ++n) {
      double sum = 0.0;
      for (int64_t k = 0; k < a.cols; ++k) sum += a.row(m)[k] * b.row(n)[k];
      out.row(m)[n] = sum;
    }
  }
  return out;
}

float decoded(Dense8Bit kind, uint8_t bits) {
  if (kind == Dense8Bit::kInt8) return static_cast<int8_t>(bits);
  __nv_fp8_e4m3 value;
  value.__x = bits;
  return static_cast<float>(value);
}

// The nearest values that a row can represent, computed in f32 as on the device.
HostMatrix quantised(Dense8Bit kind, const HostMatrix& a) {
  HostMatrix out = a;
  const float limit = kind == Dense8Bit::kFp8 ? 448.0f : 127.0f;
  for (int64_t m = 0; m < a.rows; ++m) {
    float largest = 1e-30f;
    for (int64_t k = 0; k < a.cols; ++k) {
      largest = std::max(largest, std::abs(static_cast<float>(a.row(m)[k])));
    }
    const float inverse = limit / largest, scale = largest / limit;
    for (int64_t k = 0; k < a.cols; ++k) {
      const float scaled = static_cast<float>(a.row(m)[k]) * inverse;
      const float value = kind == Dense8Bit::kFp8 ? static_cast<float>(__nv_fp8_e4m3(scaled))
                                                  : std::nearbyint(scaled);
      out.row(m)[k] = double{value} * double{scale};
    }
  }
  return out;
}

HostMatrix dequantised(Dense8Bit kind, const Rows8BitCuda& device, int64_t rows, int64_t cols) {
  const auto values = download(device.values);
  const auto scales = download(device.scales);
  HostMatrix out{rows, cols, Doubles(values.size())};
  for (size_t i = 0; i < values.size(); ++i) {
    out.values[i] =
        double{decoded(kind, values[i])} * double{scales[i / static_cast<size_t>(cols)]};
  }
  return out;
}

// |a - b| / |b|, NaN if an element is.
double distance(const Doubles& a, const Doubles& b) {
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  return std::sqrt(difference / size);
}

struct HostLayer {
  HostMatrix x, gate, up, down;  // gate: no rows without a gate; down: [D, F]
};

HostMatrix hidden(const HostLayer& layer, Activation activation) {
  HostMatrix u = product(layer.x, layer.up);
  const bool gated = layer.gate.rows > 0;
  const HostMatrix g = gated ? product(layer.x, layer.gate) : u;
  for (size_t i = 0; i < u.values.size(); ++i) {
    const double positive = std::max(g.values[i], 0.0);
    const double f = activation == Activation::kRelu2 ? positive * positive : positive;
    u.values[i] = gated ? f * u.values[i] : f;
  }
  return u;
}

// Times 1/2, 1 or 2.
void scale_by_power(__nv_bfloat16& value, size_t index) {
  value = __float2bfloat16(std::ldexp(__bfloat162float(value), static_cast<int>(index % 3) - 1));
}

struct Case {
  Dense8Bit kind;
  int64_t tokens, width, ffn;
  bool gated;
  Activation activation;
};

void check_layer(CudaContext& ctx, const Case& c) {
  SCOPED_TRACE(testing::Message() << dense_8bit_name(c.kind) << ", " << c.tokens << " tokens, D "
                                  << c.width << ", F " << c.ffn << (c.gated ? ", gated, " : ", ")
                                  << activation_name(c.activation));
  auto x = random_bf16(c.tokens * c.width, 1), gate = random_bf16(c.ffn * c.width, 2, 0.05f),
       up = random_bf16(c.ffn * c.width, 3, 0.05f), down = random_bf16(c.ffn * c.width, 4, 0.05f);
  // Rows, and outputs of w_down, of different sizes show a scale applied to another one.
  for (size_t i = 0; i < up.size(); ++i) {
    const auto width = static_cast<size_t>(c.width), neuron = i / width, output = i % width;
    scale_by_power(gate[i], neuron);
    scale_by_power(up[i], neuron + 1);
    scale_by_power(down[i], output);
    if (neuron == 1) up[i] = __float2bfloat16(0.0f);
    if (i < x.size()) scale_by_power(x[i], neuron);
  }
  const auto device_x = upload(x), device_gate = upload(gate), device_up = upload(up),
             device_down = upload(down);
  const FfnWeightsCuda weights{.w_gate = c.gated ? device_gate.data() : nullptr,
                               .w_up = device_up.data(),
                               .w_down = device_down.data(),
                               .activation = c.activation};
  const FfnWeights8BitCuda quantised_weights(ctx, c.kind, weights, c.width, c.ffn);
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));

  HostLayer exact{.x = host_matrix(x, c.tokens, c.width),
                  .gate = {},
                  .up = host_matrix(up, c.ffn, c.width),
                  .down = transposed(host_matrix(down, c.ffn, c.width))};
  if (c.gated) exact.gate = host_matrix(gate, c.ffn, c.width);
  const HostLayer rounded{.x = quantised(c.kind, exact.x),
                          .gate = quantised(c.kind, exact.gate),
                          .up = quantised(c.kind, exact.up),
                          .down = quantised(c.kind, exact.down)};
  ASSERT_EQ(dequantised(c.kind, quantised_weights.up, c.ffn, c.width).values, rounded.up.values);
  ASSERT_EQ(dequantised(c.kind, quantised_weights.down, c.width, c.ffn).values,
            rounded.down.values);
  if (c.gated) {
    ASSERT_EQ(dequantised(c.kind, quantised_weights.gate, c.ffn, c.width).values,
              rounded.gate.values);
  }

  DenseFfn8BitCuda layer(ctx, c.kind, c.tokens, c.width, c.ffn, c.gated, c.activation);
  if (c.kind == Dense8Bit::kFp8 && ctx.compute_capability() < 89) {
    EXPECT_FALSE(layer.unavailable().empty());
    return;
  }
  ASSERT_EQ(layer.unavailable(), "");

  // y exactly, and from the operands that the device has.
  const HostMatrix exact_h = hidden(exact, c.activation), h = hidden(rounded, c.activation);
  const HostMatrix rounded_h = quantised(c.kind, h);
  const HostMatrix exact_y = product(exact_h, exact.down), want = product(rounded_h, rounded.down);
  // Norms of independent relative errors add up as squares. A relative change of g counts twice in
  // its square. Twice the sum allows for unequal rows.
  const auto squared_error = [](const HostMatrix& a, const HostMatrix& b) {
    return a.values.empty() ? 0.0 : std::pow(distance(a.values, b.values), 2);
  };
  const double powers = c.activation == Activation::kRelu2 ? 4.0 : 1.0;
  const double from_x = squared_error(rounded.x, exact.x);
  const double from_up = from_x + squared_error(rounded.up, exact.up);
  const double from_gate = c.gated ? from_x + squared_error(rounded.gate, exact.gate) : 0.0;
  const double expected =
      std::sqrt((c.gated ? powers * from_gate + from_up : powers * from_up) +
                squared_error(rounded_h, h) + squared_error(rounded.down, exact.down));
  // Beyond that the device rounds g, u and y to bf16 (2^-9 each) and sums e4m3 products with at
  // least 13 bits in steps of 32. A relative change e of a value flips its rounding to steps of s
  // with probability e / s, which changes it by s: a norm of sqrt(e s). s is at most 2^-3 for e4m3.
  // s32 sums are exact, so that only y is rounded, and few values flip.
  const double steps = static_cast<double>(std::max(c.width, c.ffn)) / 32.0 + 1.0;
  const double change = powers * (std::ldexp(2.0, -9) + steps * std::ldexp(1.0, -13));
  const double near =
      c.kind == Dense8Bit::kFp8 ? change + std::sqrt(change * 0.125) : std::ldexp(1.0, -8);

  const auto y = poisoned<__nv_bfloat16>(c.tokens * c.width);
  const auto check = [&](const char* when) {
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
    const Doubles got = host_matrix(download(y), c.tokens, c.width).values;
    EXPECT_LE(distance(got, want.values), near) << when;
    EXPECT_LE(distance(got, exact_y.values), 2.0 * expected + near) << when;
    return got;
  };
  layer.forward(ctx, quantised_weights, device_x.data(), y.data());
  check("before tuning");
  layer.tune(ctx, quantised_weights, device_x.data(), y.data());
  testing::Test::RecordProperty("arithmetic", layer.arithmetic());
  Doubles repeats[2];
  for (Doubles& repeat : repeats) {
    TWELL_CUDA_CHECK(cudaMemsetAsync(y.data(), 0xff, static_cast<size_t>(y.bytes()), ctx.stream()));
    const CudaGraph graph(
        ctx.stream(), [&] { layer.forward(ctx, quantised_weights, device_x.data(), y.data()); });
    graph.launch(ctx.stream());
    repeat = check("tuned, in a graph");
  }
  EXPECT_EQ(repeats[0], repeats[1]);
}

void check_layers(CudaContext& ctx, Dense8Bit kind) {
  for (const int64_t tokens : {1, 127, 129}) {
    for (const bool gated : {true, false}) {
      check_layer(ctx, {kind, tokens, 272, 528, gated, Activation::kRelu});
    }
    check_layer(ctx, {kind, tokens, 64, 176, true, Activation::kRelu2});
  }
  check_layer(ctx, {kind, 16, 528, 272, false, Activation::kRelu2});
  check_layer(ctx, {kind, 40, 4112, 48, true, Activation::kRelu});  // rows of more than 256 pieces
}

TEST(Dense8BitCudaTest, Fp8EqualsQuantisedReference) {
  TWELL_GPU_TEST();
  check_layers(ctx, Dense8Bit::kFp8);
}

TEST(Dense8BitCudaTest, Int8EqualsQuantisedReference) {
  TWELL_GPU_TEST();
  check_layers(ctx, Dense8Bit::kInt8);
}

TEST(Dense8BitCudaTest, SaysWhatItCannotRun) {
  TWELL_GPU_TEST();
  const auto why = [&](int64_t tokens, int64_t width, int64_t ffn, Activation activation) {
    return DenseFfn8BitCuda(ctx, Dense8Bit::kInt8, tokens, width, ffn, true, activation)
        .unavailable();
  };
  EXPECT_EQ(why(4, 72, 64, Activation::kRelu), "width 72 and FFN size 64 are not multiples of 16");
  EXPECT_EQ(why(4, 64, 64, Activation::kSilu), "its activation is silu, not relu or relu2");
  EXPECT_NE(why(4, 64, int64_t{1} << 24, Activation::kRelu).find("shared memory"),
            std::string::npos);
  EXPECT_NE(why(int64_t{1} << 33, 64, 64, Activation::kRelu).find("GPU memory"), std::string::npos);
}

}  // namespace
}  // namespace twell
