// SPDX-License-Identifier: Apache-2.0
// Layers in e4m3 through ffn_forward_cuda, by each execution that takes them, against sums in f64
// of what the bytes stand for.
#include "twell/ops/ffn/bytes/byte_ffn_cuda.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"
#include "twell/ops/ffn/ffn_cuda.h"
#include "twell/ops/ffn/tile_union/tile_union_kernels.h"

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

// A layer's inputs on the host.
struct ByteOperands {
  OwnedByteMatrix x, first, second, down;
  std::vector<__nv_bfloat16> before;  // what y holds already, where the layer adds to it
};

// Random inputs, and what both kinds of executions make of them.
class Reference {
 public:
  explicit Reference(const ByteCase& c)
      : c_(c),
        operands_{.x = e4m3_rows(input_values(c), c.tokens, c.width),
                  .first = e4m3_rows(firing_values(c), c.ffn, c.width),
                  .second = e4m3_rows(up_values(c), c.ffn, c.width),
                  .down = e4m3_rows(down_values(c), c.width, c.ffn),
                  .before = random_bf16(c.tokens * c.width, 8)} {
    make_h();
  }

  const ByteOperands& operands() const { return operands_; }
  int64_t nnz() const { return nnz_; }

  std::vector<double> y(Hidden hidden) const {
    const OwnedByteMatrix h_bytes = e4m3_rows(h_, c_.tokens, c_.ffn);
    std::vector<double> y(static_cast<size_t>(c_.tokens * c_.width));
    for (int64_t m = 0; m < c_.tokens; ++m) {
      for (int64_t d = 0; d < c_.width; ++d) {
        double sum = 0.0;
        if (hidden == Hidden::kTokens) {
          sum = product(h_bytes.view(), m, operands_.down.view(), d);
        } else {
          for (int64_t n = 0; n < c_.ffn; ++n) {
            float of_h = h_[at(m, c_.ffn, n)];
            if (of_h == 0.0f) continue;
            if (hidden == Hidden::kBlocks) of_h = four_bits(of_h);
            sum += double{of_h} * double{operands_.down.view().at(d, n)};
          }
        }
        if (c_.add) sum += double{__bfloat162float(operands_.before[at(m, c_.width, d)])};
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
    const ByteMatrix x = operands_.x.view(), first = operands_.first.view();
    h_.resize(static_cast<size_t>(c_.tokens * c_.ffn));
    for (int64_t m = 0; m < c_.tokens; ++m) {
      for (int64_t n = 0; n < c_.ffn; ++n) {
        const double g = rounded_bf16(std::max(product(x, m, first, n), 0.0));
        nnz_ += g > 0.0;
        double value = c_.activation == Activation::kRelu2 ? g * g : g;
        if (c_.gated && g > 0.0) {
          const double u = product(x, m, operands_.second.view(), n);
          value *= c_.activation == Activation::kDRelu ? std::max(u, 0.0) : u;
        }
        h_[at(m, c_.ffn, n)] = static_cast<float>(rounded_bf16(value));
      }
    }
  }

  ByteCase c_;
  ByteOperands operands_;
  std::vector<float> h_;
  int64_t nnz_ = 0;
};

// The layer on the GPU.
class ByteLayer {
 public:
  ByteLayer(CudaContext& ctx, const ByteCase& c, const ByteOperands& operands)
      : ctx_(ctx),
        c_(c),
        before_(operands.before),
        x_(operands.x),
        first_(operands.first),
        second_(operands.second),
        down_(operands.down),
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
    std::vector<__nv_bfloat16> start = before_;
    if (mapped) {
      for (int64_t m = 0; m < c_.tokens; ++m) {
        std::copy_n(before_.begin() + m * c_.width, c_.width,
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
  const std::vector<__nv_bfloat16>& before_;
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
  ByteLayer layer(ctx, c, reference.operands());
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

// --- h that e4m3 holds badly, in tile-union ---
//
// A token is of a class c, and its x is 1 in column c alone. So its gates and up values are single
// products of an e4m3 and powers of two, which every step before h computes exactly, and h in e4m3
// is known to the bit. Tiles of 128 tokens are of kinds, each of which has classes of its own.

enum class Trait {
  kNone,      // no neuron is active
  kOne,       // one is
  kFew,       // five are
  kAll,       // all are
  kSome,      // about half of them
  kBarely,    // three of four gates are at most 2^-17 of the fourth
  kNearZero,  // two of three up values are 0 or at most 2^-17 of the third
  kTiny,      // every h is below the normal numbers of f32
  kLarge,     // h is up to 2^96
  kLargest,   // one h, next to the largest number of f32
  kProduct,   // some g * u overflow
  kGate,      // some gates overflow
  kNan,       // x has a NaN
  kInfinite,  // x has an infinity: its byte is a NaN then, and its scale is infinite
  kUnion      // active neurons are a quarter of the kind's union
};

struct TileKind {
  std::vector<Trait> traits;  // one for each class
  int neurons = 0;            // of the union, with kUnion
};

struct HardCase {
  const char* name;
  Activation activation;
  int repeats;  // of each kind of tile: the more tiles, the larger are the items of up
};

class HardLayer {
 public:
  static constexpr int64_t kWidth = 64, kFfn = 1040;

  explicit HardLayer(const HardCase& c) : activation_(c.activation) {
    using enum Trait;
    kinds_.push_back({{kNone, kOne, kAll, kSome, kBarely, kNearZero, kTiny, kLarge, kLargest,
                       kProduct, kGate, kNan, kInfinite, kSome}});
    // Tokens with all neurons are heavy here, and tiles of their own.
    kinds_.push_back({{kAll, kNone, kOne, kFew, kNone, kOne, kNone, kNone}});
    for (const int neurons : {0, 1, 63, 64, 65, 128, 129, 192, 193}) {
      kinds_.push_back({{kUnion, kUnion, kUnion, kUnion}, neurons});
    }
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      first_class_.push_back(static_cast<int>(traits_.size()));
      for (const Trait trait : kinds_[kind].traits) {
        traits_.push_back(trait);
        kind_of_.push_back(static_cast<int>(kind));
      }
    }
    // The last tile is not full.
    tokens_ = static_cast<int64_t>(kinds_.size()) * c.repeats * tile_union::kTileTokens - 28;
    make_operands();
  }

  int64_t tokens() const { return tokens_; }
  const ByteOperands& operands() const { return operands_; }
  ByteCase shape() const { return {"hard", tokens_, kWidth, kFfn, 0.0, true, activation_}; }

  int class_of(int64_t token) const {
    const auto kind = static_cast<size_t>(token / tile_union::kTileTokens) % kinds_.size();
    const auto classes = static_cast<int>(kinds_[kind].traits.size());
    return first_class_[kind] + static_cast<int>(token % tile_union::kTileTokens) % classes;
  }

  int64_t nnz() const {
    std::vector<int64_t> of(traits_.size());
    for (size_t c = 0; c < of.size(); ++c) {
      for (int64_t n = 0; n < kFfn; ++n) of[c] += active(static_cast<int>(c), n);
    }
    int64_t sum = 0;
    for (int64_t m = 0; m < tokens_; ++m) sum += of[static_cast<size_t>(class_of(m))];
    return sum;
  }

  struct Sum {
    double value = 0.0;
    double bound = 0.0;  // of what y may be off
  };
  // The row of y of a class's tokens; empty: not a number, as in a dense layer.
  std::vector<Sum> expected(int c) const {
    const std::vector<int64_t> ids = union_of(c);
    std::vector<float> h;
    for (const int64_t n : ids) h.push_back(hidden(c, n));
    const bool finite = std::all_of(h.begin(), h.end(), [](float v) { return std::isfinite(v); });
    if (!finite) return {};
    quantise(h);
    std::vector<Sum> row;
    for (int64_t d = 0; d < kWidth; ++d) row.push_back(column(ids, h, d));
    return row;
  }

 private:
  static uint32_t draw(uint64_t stream, size_t index) { return philox(31, stream, index)[0]; }
  // Any e4m3 but NaN.
  static uint8_t random_byte(uint64_t stream, size_t index) {
    const auto byte = static_cast<uint8_t>(draw(stream, index));
    return (byte & 0x7f) == 0x7f ? static_cast<uint8_t>(byte ^ 0x40) : byte;
  }
  static constexpr uint8_t kOneByte = 0x38, kMost = 0x7e, kLeast = 0x01, kNanByte = 0x7f,
                           kRests = 0xb8;  // 1, 448, 2^-9, NaN, -1
  static constexpr int64_t kLargestNeuron = 700;

  bool special(Trait trait) const { return trait == Trait::kNan || trait == Trait::kInfinite; }
  float scale_of(Trait trait) const {
    switch (trait) {
      case Trait::kTiny:
        return 0x1p-67f;
      case Trait::kLarge:
        return 0x1p36f;
      case Trait::kLargest:
        return 0x1p55f;
      case Trait::kProduct:
        return 0x1p62f;
      case Trait::kGate:
        return 0x1p120f;
      case Trait::kInfinite:
        return std::numeric_limits<float>::infinity();
      default:
        return 1.0f;
    }
  }

  // Neuron n is the i-th of a kind's union: they are 5 apart. -1: it is not in it.
  static int place_in_union(const TileKind& kind, int64_t n) {
    return n % 5 == 2 && n / 5 < kind.neurons ? static_cast<int>(n / 5) : -1;
  }
  bool wants_active(int c, int64_t n) const {
    const size_t of = static_cast<size_t>(c);
    const TileKind& kind = kinds_[static_cast<size_t>(kind_of_[of])];
    switch (traits_[of]) {
      case Trait::kNone:
        return false;
      case Trait::kOne:
        return n == (c % 2 == 0 ? 3 : 1039);
      case Trait::kFew:
        return n % 250 == 7;
      case Trait::kLargest:
        return n == kLargestNeuron;
      case Trait::kSome:
      case Trait::kProduct:
      case Trait::kGate:
        return draw(40, at(n, kWidth, c)) % 2 == 0;
      case Trait::kUnion: {
        const int place = place_in_union(kind, n);
        return place >= 0 && place % 4 == (c - first_class_[static_cast<size_t>(kind_of_[of])]);
      }
      default:
        return true;
    }
  }
  uint8_t gate_byte(int c, int64_t n) const {
    if (!wants_active(c, n)) return kRests;
    const auto byte = static_cast<uint8_t>(random_byte(41, at(n, kWidth, c)) & 0x7f);
    switch (traits_[static_cast<size_t>(c)]) {
      case Trait::kBarely:
        return n % 4 == 0 ? kMost : kLeast;
      case Trait::kTiny:
        return kOneByte | (byte & 7);
      case Trait::kLargest:
        return kMost;
      default:
        return std::max(byte, kLeast);
    }
  }
  uint8_t up_byte(int c, int64_t n) const {
    const uint8_t byte = random_byte(42, at(n, kWidth, c));
    switch (traits_[static_cast<size_t>(c)]) {
      case Trait::kNearZero:
        return n % 3 == 0 ? byte : static_cast<uint8_t>(byte & 0x81);
      case Trait::kTiny:
        return kOneByte | (byte & 0x87);
      case Trait::kLargest:
        return kMost;
      default:
        return byte;
    }
  }

  void make_operands() {
    operands_ = {.x = {ByteType::kE4M3, tokens_, kWidth},
                 .first = {ByteType::kE4M3, kFfn, kWidth},
                 .second = {ByteType::kE4M3, kFfn, kWidth},
                 .down = {ByteType::kE4M3, kWidth, kFfn},
                 .before = {}};
    for (int64_t m = 0; m < tokens_; ++m) {
      const int c = class_of(m);
      const Trait trait = traits_[static_cast<size_t>(c)];
      operands_.x.values[at(m, kWidth, c)] = special(trait) ? kNanByte : kOneByte;
      operands_.x.scales[static_cast<size_t>(m)] = scale_of(trait);
    }
    for (int64_t n = 0; n < kFfn; ++n) {
      const auto of = static_cast<size_t>(n);
      const bool plain = n == kLargestNeuron;
      operands_.first.scales[of] = std::ldexp(1.0f, plain ? 0 : static_cast<int>(n % 7) - 3);
      operands_.second.scales[of] = std::ldexp(1.0f, plain ? 0 : static_cast<int>(n / 7 % 7) - 3);
      for (size_t c = 0; c < traits_.size(); ++c) {
        operands_.first.values[at(n, kWidth, static_cast<int64_t>(c))] =
            gate_byte(static_cast<int>(c), n);
        operands_.second.values[at(n, kWidth, static_cast<int64_t>(c))] =
            up_byte(static_cast<int>(c), n);
      }
      for (int64_t d = 0; d < kWidth; ++d) {
        operands_.down.values[at(d, kFfn, n)] = down_byte(d, n);
      }
    }
    for (int64_t d = 0; d < kWidth; ++d) {
      operands_.down.scales[static_cast<size_t>(d)] =
          std::ldexp(1.0f + static_cast<float>(draw(43, static_cast<size_t>(d)) % 64) / 64.0f, -4);
    }
  }
  // A third of the columns take all neurons, a third 64 of every 512, and a third one of 61, so
  // that small values of h are not lost beside large ones.
  static uint8_t down_byte(int64_t d, int64_t n) {
    const bool takes = d % 3 == 0 || (d % 3 == 1 ? n / 64 % 8 == d / 3 % 8 : n % 61 == d % 61);
    if (!takes) return 0;
    const uint8_t byte = random_byte(44, at(d, kFfn, n));
    return n == kLargestNeuron ? static_cast<uint8_t>(byte & 0x9f) : byte;
  }

  // One product of e4m3 values with all scales: exact, or infinite.
  float product_of(const OwnedByteMatrix& weight, int c, int64_t n) const {
    const Trait trait = traits_[static_cast<size_t>(c)];
    if (special(trait)) return std::numeric_limits<float>::quiet_NaN();
    return e4m3_to_float(weight.values[at(n, kWidth, c)]) *
           (scale_of(trait) * weight.scales[static_cast<size_t>(n)]);
  }
  bool active(int c, int64_t n) const { return !(product_of(operands_.first, c, n) <= 0.0f); }
  float hidden(int c, int64_t n) const {
    const float g = active(c, n) ? product_of(operands_.first, c, n) : 0.0f;
    float u = product_of(operands_.second, c, n);
    if (activation_ == Activation::kDRelu && u <= 0.0f) u = 0.0f;
    return (activation_ == Activation::kRelu2 ? u * g : u) * g;
  }

  int active_of(int c) const {
    int count = 0;
    for (int64_t n = 0; n < kFfn; ++n) count += active(c, n);
    return count;
  }
  // The neurons of the tile that a class's tokens are in: those of its kind, or of all heavy ones,
  // which have all.
  std::vector<int64_t> union_of(int c) const {
    const auto kind = static_cast<size_t>(kind_of_[static_cast<size_t>(c)]);
    const auto classes = static_cast<int>(kinds_[kind].traits.size());
    std::vector<int> counts;
    for (int i = 0; i < classes; ++i) counts.push_back(active_of(first_class_[kind] + i));
    const double mean = std::accumulate(counts.begin(), counts.end(), 0.0) / classes;
    const auto heavy = [&](int i) {
      const int count = counts[static_cast<size_t>(i)];
      return count > tile_union::kHeavyFloor && count > tile_union::kHeavyFactor * mean;
    };
    const bool alone = heavy(c - first_class_[kind]);
    std::vector<int64_t> ids;
    for (int64_t n = 0; n < kFfn; ++n) {
      bool in = alone;
      for (int i = 0; i < classes && !in; ++i) in = !heavy(i) && active(first_class_[kind] + i, n);
      if (in) ids.push_back(n);
    }
    return ids;
  }

  // h becomes e4m3 times the power of two of its item of up, which are as many blocks each as can
  // be, and as few items as possible but enough for all SMs.
  void quantise(std::vector<float>& h) const {
    const int blocks = static_cast<int>(h.size() + tile_union::kBlock - 1) / tile_union::kBlock;
    const auto tiles =
        static_cast<int>((tokens_ + tile_union::kTileTokens - 1) / tile_union::kTileTokens);
    const int items =
        std::max((blocks + tile_union::kMaxChunkBlocks - 1) / tile_union::kMaxChunkBlocks,
                 std::min(blocks, tile_union::kSpreadItems / tiles));
    for (int item = 0; item < items; ++item) {
      const auto begin = h.begin() + blocks * item / items * tile_union::kBlock;
      const auto end = blocks * (item + 1) / items == blocks
                           ? h.end()
                           : h.begin() + blocks * (item + 1) / items * tile_union::kBlock;
      float largest = 0.0f;
      for (auto v = begin; v != end; ++v) largest = std::max(largest, std::abs(*v));
      if (largest == 0.0f) continue;
      int exponent;
      const float mantissa = std::frexp(largest * (1.0f / 448.0f), &exponent);
      exponent = std::max(mantissa == 0.5f ? exponent - 1 : exponent, -126);
      for (auto v = begin; v != end; ++v) {
        *v = std::ldexp(e4m3_to_float(to_e4m3(std::ldexp(*v, -exponent))), exponent);
      }
    }
  }

  // y is rounded to bf16, of which the least is 2^-133. The tensor cores add with at least 13 bits,
  // 32 neurons at a time.
  Sum column(const std::vector<int64_t>& ids, const std::vector<float>& h, int64_t d) const {
    double value = 0.0, size = 0.0, steps = 1.0;
    for (size_t i = 0; i < ids.size(); ++i) {
      const double term =
          double{h[i]} * double{e4m3_to_float(operands_.down.values[at(d, kFfn, ids[i])])};
      value += term;
      size += std::abs(term);
      if (i % 32 == 31) steps += 1.0;
    }
    const double scale = double{operands_.down.scales[static_cast<size_t>(d)]};
    return {value * scale,
            std::abs(value) * scale * 0x1p-8 + size * scale * steps * 0x1p-13 + 0x1p-133};
  }

  Activation activation_;
  std::vector<TileKind> kinds_;
  std::vector<int> first_class_, kind_of_;
  std::vector<Trait> traits_;
  int64_t tokens_ = 0;
  ByteOperands operands_;
};

class ByteHiddenCudaTest : public testing::TestWithParam<HardCase> {};

TEST_P(ByteHiddenCudaTest, IsRoundedPerTokenAndItem) {
  TWELL_HOPPER_TEST();
  const HardLayer hard(GetParam());
  const ByteCase shape = hard.shape();
  ByteLayer layer(ctx, shape, hard.operands());
  FfnPlansCuda sparse(ctx, 1, HardLayer::kFfn, {FfnPolicy::Kind::kNamed, "tile-union"});
  const ByteLayer::Result got = layer.run(sparse, false, true, false);
  FfnPlansCuda dense(ctx, 1, HardLayer::kFfn, {FfnPolicy::Kind::kNamed, "dense-gemms"});
  const ByteLayer::Result want = layer.run(dense, false, true, false);
  EXPECT_EQ(got.execution, "tile-union");
  EXPECT_EQ(got.counted, hard.nnz());
  std::map<int, std::vector<HardLayer::Sum>> rows;
  double largest = 0.0;  // of errors over their bounds
  for (int64_t m = 0; m < hard.tokens(); ++m) {
    const int c = hard.class_of(m);
    if (!rows.contains(c)) rows[c] = hard.expected(c);
    const std::vector<HardLayer::Sum>& row = rows[c];
    for (int64_t d = 0; d < HardLayer::kWidth; ++d) {
      const double y = got.y[at(m, HardLayer::kWidth, d)];
      const double of_dense = want.y[at(m, HardLayer::kWidth, d)];
      ASSERT_EQ(std::isnan(of_dense), row.empty()) << "dense, token " << m << ", class " << c;
      ASSERT_EQ(std::isnan(y), row.empty())
          << y << " of token " << m << ", class " << c << ", column " << d;
      if (row.empty()) continue;
      const auto [value, bound] = row[static_cast<size_t>(d)];
      ASSERT_LE(std::abs(y - value), bound)
          << y << ", not " << value << ", of token " << m << ", class " << c << ", column " << d;
      largest = std::max(largest, std::abs(y - value) / bound);
    }
  }
  fmt::print("{}: largest error {:.2f} of its bound\n", GetParam().name, largest);
}

INSTANTIATE_TEST_SUITE_P(Shapes, ByteHiddenCudaTest,
                         testing::Values(HardCase{"few_tiles", Activation::kRelu, 1},
                                         HardCase{"many_tiles", Activation::kRelu, 12},
                                         HardCase{"relu2", Activation::kRelu2, 3},
                                         HardCase{"drelu", Activation::kDRelu, 6}),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace twell
