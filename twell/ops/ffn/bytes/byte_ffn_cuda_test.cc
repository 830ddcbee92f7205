// SPDX-License-Identifier: Apache-2.0
// Layers in e4m3 through ffn_forward_cuda, by each execution that takes them, against sums in f64
// of what the bytes stand for.
#include "twell/ops/ffn/bytes/byte_ffn_cuda.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"
#include "twell/ops/ffn/ffn_cuda.h"

namespace twell {
namespace {

struct DeviceBytes {
  explicit DeviceBytes(const OwnedByteMatrix& host)
      : values(upload(host.values)), scales(upload(host.scales)) {}
  ByteRowsCuda view() const { return {values.data(), scales.data()}; }
  DeviceBuffer<uint8_t> values;
  DeviceBuffer<float> scales;
};

// A matrix whose rows have different sizes.
std::vector<float> rows_of_sizes(int64_t rows, int64_t cols, uint64_t stream, float scale) {
  std::vector<float> values = to_floats(random_bf16(rows * cols, stream, scale));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = std::ldexp(values[i], static_cast<int>(i / static_cast<size_t>(cols) % 3) - 1);
  }
  return values;
}

OwnedByteMatrix e4m3_rows(const std::vector<float>& values, int64_t rows, int64_t cols) {
  return quantise_rows(ByteType::kE4M3, ConstMatrixF(values.data(), rows, cols));
}

// What each byte stands for: the references below look some hundred million of them up.
std::array<double, 256> e4m3_values() {
  std::array<double, 256> values;
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = double{e4m3_to_float(static_cast<uint8_t>(i))};
  }
  return values;
}

double product(const ByteMatrix& a, int64_t row, const ByteMatrix& b, int64_t col) {
  static const std::array<double, 256> kValues = e4m3_values();
  const uint8_t* const x = a.values + row * a.cols;
  const uint8_t* const y = b.values + col * b.cols;
  double sum = 0.0;
  for (int64_t k = 0; k < a.cols; ++k) sum += kValues[x[k]] * kValues[y[k]];
  return sum * double{a.scales[row]} * double{b.scales[col]};
}

struct ByteCase {
  const char* name;
  int64_t tokens, width, ffn;
  double active;  // share of neurons whose gates are not pushed below zero
  bool gated = true;
  Activation activation = Activation::kRelu;
  bool add = false, mapped = false;
  // The second 300 of every 900 neurons have u 2^apart times as large as random, the third 300
  // 2^-apart, and w_down the inverse, so that all count alike in y and blocks of h differ in
  // exponent.
  int apart = 0;
  double up = 0.05;  // size of the up weights

  int exponent(int64_t neuron) const {
    constexpr int kOf[3] = {0, 1, -1};
    return apart * kOf[neuron / 300 % 3];
  }
};

// How an execution keeps h: bf16; e4m3 with a scale per token; or e4m3 with powers of two as
// scales of tokens in blocks of neurons, which leaves four significant bits of every value.
enum class Hidden { kBf16, kTokens, kBlocks };

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  return std::sqrt(difference / size);
}

double rounded_bf16(double value) { return to_float(to_bf16(static_cast<float>(value))); }

size_t at(int64_t row, int64_t cols, int64_t col) { return static_cast<size_t>(row * cols + col); }

// A layer's inputs on the host, and what both kinds of executions make of them.
class Reference {
 public:
  explicit Reference(const ByteCase& c)
      : c_(c),
        x_(e4m3_rows(input_values(c), c.tokens, c.width)),
        first_(e4m3_rows(firing_values(c), c.ffn, c.width)),
        second_(e4m3_rows(up_values(c), c.ffn, c.width)),
        down_(e4m3_rows(down_values(c), c.width, c.ffn)),
        before_(random_bf16(c.tokens * c.width, 8)) {
    make_h();
  }

  const OwnedByteMatrix& x() const { return x_; }
  const OwnedByteMatrix& first() const { return first_; }
  const OwnedByteMatrix& second() const { return second_; }
  const OwnedByteMatrix& down() const { return down_; }
  // What y holds already, where the layer adds to it.
  const std::vector<__nv_bfloat16>& before() const { return before_; }
  int64_t nnz() const { return nnz_; }

  std::vector<double> y(Hidden hidden) const {
    const OwnedByteMatrix h_bytes = e4m3_rows(h_, c_.tokens, c_.ffn);
    std::vector<double> y(static_cast<size_t>(c_.tokens * c_.width));
    for (int64_t m = 0; m < c_.tokens; ++m) {
      for (int64_t d = 0; d < c_.width; ++d) {
        double sum = 0.0;
        if (hidden == Hidden::kTokens) {
          sum = product(h_bytes.view(), m, down_.view(), d);
        } else {
          for (int64_t n = 0; n < c_.ffn; ++n) {
            float of_h = h_[at(m, c_.ffn, n)];
            if (of_h == 0.0f) continue;
            if (hidden == Hidden::kBlocks) of_h = four_bits(of_h);
            sum += double{of_h} * double{down_.view().at(d, n)};
          }
        }
        if (c_.add) sum += double{__bfloat162float(before_[at(m, c_.width, d)])};
        y[at(m, c_.width, d)] = sum;
      }
    }
    return y;
  }

 private:
  // The first column of x is large, and that of the firing weights negative where neurons rest.
  // Every seventh of many tokens activates all of its neurons, so that tiles overflow.
  static std::vector<float> input_values(const ByteCase& c) {
    auto values = rows_of_sizes(c.tokens, c.width, 1, 1.0f);
    for (int64_t m = 0; m < c.tokens; ++m) {
      values[at(m, c.width, 0)] = c.tokens > 64 && m % 7 == 3 ? -4.0f : 4.0f;
    }
    return values;
  }
  static std::vector<float> firing_values(const ByteCase& c) {
    auto values = rows_of_sizes(c.ffn, c.width, 2, 0.05f);
    for (int64_t n = 0; n < c.ffn; ++n) {
      const bool active = uniform(3, 4, static_cast<uint64_t>(n)) < c.active;
      values[at(n, c.width, 0)] = active ? 0.5f : -3.0f;
    }
    return values;
  }

  static std::vector<float> up_values(const ByteCase& c) {
    auto values = rows_of_sizes(c.ffn, c.width, 5, static_cast<float>(c.up));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = std::ldexp(values[i], c.exponent(static_cast<int64_t>(i) / c.width));
    }
    return values;
  }
  static std::vector<float> down_values(const ByteCase& c) {
    auto values = rows_of_sizes(c.width, c.ffn, 6, 0.1f);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = std::ldexp(values[i], -c.exponent(static_cast<int64_t>(i) % c.ffn));
    }
    return values;
  }
  static float four_bits(float value) {
    int exponent;
    const float mantissa = std::frexp(value, &exponent);
    return std::ldexp(std::nearbyint(mantissa * 16.0f), exponent - 4);
  }

  void make_h() {
    h_.resize(static_cast<size_t>(c_.tokens * c_.ffn));
    for (int64_t m = 0; m < c_.tokens; ++m) {
      for (int64_t n = 0; n < c_.ffn; ++n) {
        const double g = rounded_bf16(std::max(product(x_.view(), m, first_.view(), n), 0.0));
        nnz_ += g > 0.0;
        double value = c_.activation == Activation::kRelu2 ? g * g : g;
        if (c_.gated && g > 0.0) {
          const double u = product(x_.view(), m, second_.view(), n);
          value *= c_.activation == Activation::kDRelu ? std::max(u, 0.0) : u;
        }
        h_[at(m, c_.ffn, n)] = static_cast<float>(rounded_bf16(value));
      }
    }
  }

  ByteCase c_;
  OwnedByteMatrix x_, first_, second_, down_;
  std::vector<__nv_bfloat16> before_;
  std::vector<float> h_;
  int64_t nnz_ = 0;
};

// The layer on the GPU.
class ByteLayer {
 public:
  ByteLayer(CudaContext& ctx, const ByteCase& c, const Reference& reference)
      : ctx_(ctx),
        c_(c),
        reference_(reference),
        x_(reference.x()),
        first_(reference.first()),
        second_(reference.second()),
        down_(reference.down()),
        workspace_(ctx, c.tokens, c.width, c.ffn, c.gated),
        order_(static_cast<size_t>(c.tokens)),
        down_rows_(poisoned<uint8_t>(c.ffn * c.width)) {
    workspace_.make_for_bytes();
    std::iota(order_.begin(), order_.end(), 0);
    std::reverse(order_.begin(), order_.end());
    y_rows_ = upload(order_);
    TWELL_CUDA_CHECK(launch_transpose_bytes(down_.view().values, c.width, c.ffn, down_rows_.data(),
                                            ctx.stream()));
  }

  struct Result {
    std::vector<double> y;
    std::string execution;
    double nnz_per_token = 0.0;
    int64_t counted = 0;  // by an execution that counts per token
  };

  // `few` executions count non-zeros per layer; `rows`: they get w_down's rows, or make them;
  // `mapped`: tokens of y are in another order.
  Result run(FfnPlansCuda& plans, bool few, bool rows, bool mapped) {
    const auto row_nnz = poisoned<int32_t>(c_.tokens);
    std::vector<__nv_bfloat16> start = reference_.before();
    if (mapped) {
      for (int64_t m = 0; m < c_.tokens; ++m) {
        std::copy_n(reference_.before().begin() + m * c_.width, c_.width,
                    start.begin() + order_[static_cast<size_t>(m)] * c_.width);
      }
    }
    const auto y = c_.add ? upload(start) : poisoned<__nv_bfloat16>(c_.tokens * c_.width);
    const FfnForwardCuda problem{
        .tokens = c_.tokens,
        .rows = c_.tokens,
        .weights = {.activation = c_.activation,
                    .gate_bytes = c_.gated ? first_.view() : ByteRowsCuda{},
                    .up_bytes = c_.gated ? second_.view() : first_.view(),
                    .down_bytes = down_.view(),
                    .down_rows = rows ? down_rows_.data() : nullptr},
        .y = y.data(),
        .row_nnz = few ? nullptr : row_nnz.data(),
        .add = c_.add,
        .y_rows = mapped ? y_rows_.data() : nullptr,
        .x_bytes = x_.view()};
    ffn_forward_cuda(ctx_, problem, plans[0], workspace_);
    plans.update(ctx_);
    Result result;
    result.execution = plans[0].plan.execution.name;
    if (few) {
      result.nnz_per_token = plans[0].activity.nnz_per_token;
    } else {
      const auto counts = download(row_nnz);
      result.counted = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    }
    const auto there = download(y);
    result.y.resize(there.size());
    for (int64_t m = 0; m < c_.tokens; ++m) {
      const int64_t row = mapped ? order_[static_cast<size_t>(m)] : m;
      for (int64_t d = 0; d < c_.width; ++d) {
        result.y[at(m, c_.width, d)] = double{__bfloat162float(there[at(row, c_.width, d)])};
      }
    }
    return result;
  }

 private:
  CudaContext& ctx_;
  ByteCase c_;
  const Reference& reference_;
  DeviceBytes x_, first_, second_, down_;
  FfnWorkspaceCuda workspace_;
  std::vector<int32_t> order_;
  DeviceBuffer<int32_t> y_rows_;
  DeviceBuffer<uint8_t> down_rows_;
};

// g, u, h and y are rounded to bf16 (2^-9 each), sums of e4m3 products have at least 13 bits. A
// relative change e flips e4m3's rounding of h, in steps of at most 2^-3, with probability e /
// 2^-3, a norm of sqrt(e 2^-3).
double bound_of(const ByteCase& c, bool hidden_in_bytes) {
  const double steps = static_cast<double>(std::max(c.width, c.ffn)) / 32.0 + 1.0;
  const double change = 2.0 * (4.0 * 0x1p-9 + steps * 0x1p-13);
  return hidden_in_bytes ? change + std::sqrt(change * 0.125) : change;
}

class ByteFfnCudaTest : public testing::TestWithParam<ByteCase> {};

TEST_P(ByteFfnCudaTest, EqualsTheReferenceDenseAndSparse) {
  TWELL_HOPPER_TEST();
  const ByteCase& c = GetParam();
  const Reference reference(c);
  ByteLayer layer(ctx, c, reference);
  const auto nnz = static_cast<double>(reference.nnz());
  for (const std::string_view name :
       {"dense-gemms", "tile-union", "dense-few-fp8", "small-batch-fp8", "made rows"}) {
    SCOPED_TRACE(name);
    const bool few = name != "dense-gemms" && name != "tile-union";
    if (few && c.tokens > 64) continue;
    const bool makes_rows = name == "made rows";
    Hidden hidden = name.starts_with("dense") ? Hidden::kTokens : Hidden::kBf16;
    if (name == "tile-union" && c.gated) hidden = Hidden::kBlocks;
    const std::string_view execution = makes_rows ? "small-batch-fp8" : name;
    // Tile-union takes w_down of either order.
    const bool rows = few ? !makes_rows : c.mapped;
    const bool mapped = c.mapped && name == "tile-union";
    FfnPlansCuda plans(ctx, 1, c.ffn, {FfnPolicy::Kind::kNamed, execution});
    const ByteLayer::Result got = layer.run(plans, few, rows, mapped);
    const ByteLayer::Result again = layer.run(plans, few, rows, mapped);
    EXPECT_EQ(again.execution, execution);
    EXPECT_EQ(again.y, got.y);
    const double error = distance(got.y, reference.y(hidden));
    const double bound = bound_of(c, hidden != Hidden::kBf16);
    fmt::print("{} {}: error {:.2e}, bound {:.2e}\n", c.name, name, error, bound);
    EXPECT_LE(error, bound);
    // Gates next to zero may be rounded to either side.
    const double counted =
        few ? got.nnz_per_token * static_cast<double>(c.tokens) : static_cast<double>(got.counted);
    EXPECT_NEAR(counted, nnz, 1.0 + 1e-3 * nnz);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, ByteFfnCudaTest,
    testing::Values(
        ByteCase{"one", 1, 64, 256, 0.5}, ByteCase{"one_ragged", 1, 208, 2064, 0.03},
        ByteCase{"eight", 8, 1040, 5632, 0.01, true, Activation::kRelu, true},
        // Some 75, 115 and all of the 192 neurons of a cluster are active.
        ByteCase{"nine", 9, 336, 5632, 0.4, true, Activation::kRelu, true},
        ByteCase{"seventeen", 17, 144, 5632, 0.6, true, Activation::kRelu2},
        ByteCase{"all", 24, 112, 5632, 1.0},
        ByteCase{"thirty_three", 33, 80, 1040, 0.1, true, Activation::kDRelu},
        ByteCase{"sixty_four", 64, 656, 1040, 0.1, true, Activation::kRelu, true},
        // A CTA's slice of x does not fit into shared memory.
        ByteCase{"wide_x", 12, 4624, 208, 0.3}, ByteCase{"wide_x_all", 3, 8208, 208, 1.0},
        ByteCase{"none_of_few", 64, 96, 512, 0.0, true, Activation::kRelu, true},
        ByteCase{"few_not_gated", 20, 656, 1552, 0.1, false, Activation::kRelu, true},
        ByteCase{"many_neurons", 6, 64, 20000, 0.2}, ByteCase{"ragged", 127, 272, 528, 0.1},
        ByteCase{"ragged2", 129, 144, 1040, 0.02, true, Activation::kRelu, true, true},
        ByteCase{"none", 130, 64, 256, 0.0}, ByteCase{"full", 200, 128, 512, 1.0},
        ByteCase{"relu2", 140, 128, 528, 0.1, true, Activation::kRelu2, true},
        ByteCase{"not_gated", 150, 128, 784, 0.1, false, Activation::kRelu, true, true},
        ByteCase{"not_gated_relu2", 64, 64, 272, 0.3, false, Activation::kRelu2},
        ByteCase{"wide", 300, 1600, 1296, 0.05, true, Activation::kRelu, true, true},
        ByteCase{"far_apart", 140, 272, 2064, 0.6, true, Activation::kRelu, false, false, 6},
        ByteCase{"large_up", 130, 144, 528, 0.2, true, Activation::kRelu2, false, false, 0, 1e12},
        ByteCase{"small_up", 130, 144, 528, 0.2, true, Activation::kDRelu, false, false, 0, 1e-12}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace twell
