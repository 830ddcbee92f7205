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

OwnedByteMatrix quantised(const std::vector<float>& values, int64_t rows, int64_t cols) {
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

struct Case {
  const char* name;
  int64_t tokens, width, ffn;
  double active;  // share of neurons whose gates are not pushed below zero
  bool gated = true;
  Activation activation = Activation::kRelu;
  bool add = false, mapped = false;
};

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  return std::sqrt(difference / size);
}

double rounded_bf16(double value) { return to_float(to_bf16(static_cast<float>(value))); }

class ByteFfnCudaTest : public testing::TestWithParam<Case> {};

TEST_P(ByteFfnCudaTest, EqualsTheReferenceDenseAndSparse) {
  TWELL_HOPPER_TEST();
  const Case& c = GetParam();
  auto x_values = rows_of_sizes(c.tokens, c.width, 1, 1.0f);
  auto firing = rows_of_sizes(c.ffn, c.width, 2, 0.05f);
  // The first column of x is large, and that of the firing weights negative where neurons rest.
  // Every seventh of many tokens activates all of its neurons, so that tiles overflow.
  for (int64_t m = 0; m < c.tokens; ++m) {
    x_values[static_cast<size_t>(m * c.width)] = c.tokens > 64 && m % 7 == 3 ? -4.0f : 4.0f;
  }
  for (int64_t n = 0; n < c.ffn; ++n) {
    const bool active = uniform(3, 4, static_cast<uint64_t>(n)) < c.active;
    firing[static_cast<size_t>(n * c.width)] = active ? 0.5f : -3.0f;
  }
  const OwnedByteMatrix x = quantised(x_values, c.tokens, c.width),
                        first = quantised(firing, c.ffn, c.width),
                        second = quantised(rows_of_sizes(c.ffn, c.width, 5, 0.05f), c.ffn, c.width),
                        down = quantised(rows_of_sizes(c.width, c.ffn, 6, 0.1f), c.width, c.ffn);
  const auto at = [](int64_t row, int64_t cols, int64_t col) {
    return static_cast<size_t>(row * cols + col);
  };
  // h as the two executions have it: in bf16, and quantised per token.
  std::vector<float> h(static_cast<size_t>(c.tokens * c.ffn));
  int64_t nnz = 0;
  for (int64_t m = 0; m < c.tokens; ++m) {
    for (int64_t n = 0; n < c.ffn; ++n) {
      const double g = rounded_bf16(std::max(product(x.view(), m, first.view(), n), 0.0));
      nnz += g > 0.0;
      double value = c.activation == Activation::kRelu2 ? g * g : g;
      if (c.gated && g > 0.0) {
        const double u = product(x.view(), m, second.view(), n);
        value *= c.activation == Activation::kDRelu ? std::max(u, 0.0) : u;
      }
      h[at(m, c.ffn, n)] = static_cast<float>(rounded_bf16(value));
    }
  }
  const OwnedByteMatrix h_bytes = quantised(h, c.tokens, c.ffn);
  const auto before = random_bf16(c.tokens * c.width, 8);
  const auto reference = [&](bool bytes) {
    std::vector<double> y(static_cast<size_t>(c.tokens * c.width));
    for (int64_t m = 0; m < c.tokens; ++m) {
      for (int64_t d = 0; d < c.width; ++d) {
        double sum = 0.0;
        if (bytes) {
          sum = product(h_bytes.view(), m, down.view(), d);
        } else {
          for (int64_t n = 0; n < c.ffn; ++n) {
            const float of_h = h[at(m, c.ffn, n)];
            if (of_h != 0.0f) sum += double{of_h} * double{down.view().at(d, n)};
          }
        }
        if (c.add) sum += double{__bfloat162float(before[at(m, c.width, d)])};
        y[at(m, c.width, d)] = sum;
      }
    }
    return y;
  };

  const DeviceBytes device_x(x), device_first(first), device_second(second), device_down(down);
  FfnWorkspaceCuda workspace(ctx, c.tokens, c.width, c.ffn, c.gated);
  workspace.make_for_bytes();
  std::vector<int32_t> order(static_cast<size_t>(c.tokens));
  std::iota(order.begin(), order.end(), 0);
  std::reverse(order.begin(), order.end());
  const auto y_rows = upload(order);
  const auto down_rows = poisoned<uint8_t>(c.ffn * c.width);
  TWELL_CUDA_CHECK(launch_transpose_bytes(device_down.view().values, c.width, c.ffn,
                                          down_rows.data(), ctx.stream()));
  for (const std::string_view name :
       {"dense-gemms", "tile-union", "dense-few-fp8", "small-batch-fp8", "made rows"}) {
    const bool few = name != "dense-gemms" && name != "tile-union";
    if (few && c.tokens > 64) continue;
    const bool dense = name.starts_with("dense"), makes_rows = name == "made rows";
    SCOPED_TRACE(name);
    const bool mapped = c.mapped && name == "tile-union";
    const std::string_view execution = makes_rows ? "small-batch-fp8" : name;
    FfnPlansCuda plans(ctx, 1, c.ffn, {FfnPolicy::Kind::kNamed, execution});
    const auto row_nnz = poisoned<int32_t>(c.tokens);
    std::vector<std::vector<double>> results;
    for (int repeat = 0; repeat < 2; ++repeat) {
      std::vector<__nv_bfloat16> start = before;
      if (mapped) {
        for (int64_t m = 0; m < c.tokens; ++m) {
          std::copy_n(before.begin() + m * c.width, c.width,
                      start.begin() + order[static_cast<size_t>(m)] * c.width);
        }
      }
      const auto y = c.add ? upload(start) : poisoned<__nv_bfloat16>(c.tokens * c.width);
      const FfnForwardCuda problem{
          .tokens = c.tokens,
          .rows = c.tokens,
          .weights = {.activation = c.activation,
                      .gate_bytes = c.gated ? device_first.view() : ByteRowsCuda{},
                      .up_bytes = c.gated ? device_second.view() : device_first.view(),
                      .down_bytes = device_down.view(),
                      // Tile-union widens w_down from either.
                      .down_rows = (few ? !makes_rows : c.mapped) ? down_rows.data() : nullptr},
          .y = y.data(),
          .row_nnz = few ? nullptr : row_nnz.data(),
          .add = c.add,
          .y_rows = mapped ? y_rows.data() : nullptr,
          .x_bytes = device_x.view()};
      ffn_forward_cuda(ctx, problem, plans[0], workspace);
      plans.update(ctx);
      EXPECT_EQ(plans[0].plan.execution.name, execution);
      if (few) {
        EXPECT_NEAR(plans[0].activity.nnz_per_token * static_cast<double>(c.tokens),
                    static_cast<double>(nnz), 1.0 + 1e-3 * static_cast<double>(nnz));
      }
      const auto there = download(y);
      std::vector<double> got(there.size());
      for (int64_t m = 0; m < c.tokens; ++m) {
        const int64_t row = mapped ? order[static_cast<size_t>(m)] : m;
        for (int64_t d = 0; d < c.width; ++d) {
          got[at(m, c.width, d)] = double{__bfloat162float(there[at(row, c.width, d)])};
        }
      }
      results.push_back(got);
    }
    EXPECT_EQ(results[0], results[1]);
    // g, u, h and y are rounded to bf16 (2^-9 each), sums of e4m3 products have at least 13 bits.
    // A relative change e flips e4m3's rounding of h, in steps of at most 2^-3, with probability
    // e / 2^-3, a norm of sqrt(e 2^-3).
    const double steps = static_cast<double>(std::max(c.width, c.ffn)) / 32.0 + 1.0;
    const double change = 2.0 * (4.0 * 0x1p-9 + steps * 0x1p-13);
    const double bound = dense ? change + std::sqrt(change * 0.125) : change;
    const double error = distance(results[0], reference(dense));
    fmt::print("{} {}: error {:.2e}, bound {:.2e}\n", c.name, name, error, bound);
    EXPECT_LE(error, bound);
    if (few) continue;
    const auto counts = download(row_nnz);
    const int64_t counted = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    // Gates next to zero may be rounded to either side.
    EXPECT_NEAR(static_cast<double>(counted), static_cast<double>(nnz),
                1.0 + 1e-3 * static_cast<double>(nnz));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, ByteFfnCudaTest,
    testing::Values(Case{"one", 1, 64, 256, 0.5}, Case{"one_ragged", 1, 208, 2064, 0.03},
                    Case{"eight", 8, 1040, 5632, 0.01, true, Activation::kRelu, true},
                    // Some 75, 115 and all of the 192 neurons of a cluster are active.
                    Case{"nine", 9, 336, 5632, 0.4, true, Activation::kRelu, true},
                    Case{"seventeen", 17, 144, 5632, 0.6, true, Activation::kRelu2},
                    Case{"all", 24, 112, 5632, 1.0},
                    Case{"thirty_three", 33, 80, 1040, 0.1, true, Activation::kDRelu},
                    Case{"sixty_four", 64, 656, 1040, 0.1, true, Activation::kRelu, true},
                    // A CTA's slice of x does not fit into shared memory.
                    Case{"wide_x", 12, 4624, 208, 0.3}, Case{"wide_x_all", 3, 8208, 208, 1.0},
                    Case{"none_of_few", 64, 96, 512, 0.0, true, Activation::kRelu, true},
                    Case{"few_not_gated", 20, 656, 1552, 0.1, false, Activation::kRelu, true},
                    Case{"many_neurons", 6, 64, 20000, 0.2}, Case{"ragged", 127, 272, 528, 0.1},
                    Case{"ragged2", 129, 144, 1040, 0.02, true, Activation::kRelu, true, true},
                    Case{"none", 130, 64, 256, 0.0}, Case{"full", 200, 128, 512, 1.0},
                    Case{"relu2", 140, 128, 528, 0.1, true, Activation::kRelu2, true},
                    Case{"not_gated", 150, 128, 784, 0.1, false, Activation::kRelu, true, true},
                    Case{"not_gated_relu2", 64, 64, 272, 0.3, false, Activation::kRelu2},
                    Case{"wide", 300, 1600, 1296, 0.05, true, Activation::kRelu, true, true}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace twell
