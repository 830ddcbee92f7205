// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/screened/screened_ffn_cuda.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/base/rng.h"
#include "twell/base/rounding.h"
#include "twell/base/test_bf16.h"
#include "twell/ops/ffn/screened/rotated_screen_cuda.h"

namespace twell {
namespace {

// --- The screen GEMM: integers, so that every bit has one right value ---

struct ScreenCase {
  int64_t tokens, width, ffn;
  int64_t row_step = 1;  // every row_step-th row is compared
};

class ScreenGemmCudaTest : public testing::TestWithParam<ScreenCase> {};

TEST_P(ScreenGemmCudaTest, EqualsIntegerArithmetic) {
  TWELL_HOPPER_TEST();
  const auto [tokens, width, ffn, row_step] = GetParam();
  const int64_t tiles = ceil_div(ffn, 256);
  const auto bytes = [](int64_t n, uint64_t source) {
    std::vector<int8_t> values(static_cast<size_t>(n));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<int8_t>(static_cast<int>(uniform_below(5, source, i, 255)) - 127);
    }
    return values;
  };
  const auto x = bytes(tokens * width, 1), w = bytes(ffn * width, 2);
  std::vector<TokenBound> bounds(static_cast<size_t>(tokens));
  std::vector<int32_t> spread(static_cast<size_t>(tiles * 256), 0);
  for (size_t i = 0; i < bounds.size(); ++i) {
    const auto random = static_cast<int32_t>(uniform_below(5, 3, i, 1 << 22));
    bounds[i] = {random - (3 << 20), static_cast<int32_t>(uniform_below(5, 4, i, 500))};
  }
  // The extremes: all neurons are candidates, and none.
  bounds[0] = {kScreenMostBase, 0};
  if (tokens > 2) bounds[2] = {-kScreenMostBase, 0};
  for (int64_t n = 0; n < ffn; ++n) {
    spread[static_cast<size_t>(n)] =
        static_cast<int32_t>(uniform_below(5, 6, static_cast<uint64_t>(n), 1000));
  }
  const auto device_x = upload(x), device_w = upload(w);
  const auto device_bounds = upload(bounds);
  const auto device_spread = upload(spread);
  const auto words = poisoned<uint32_t>(tokens * tiles * 8);
  const auto counts = poisoned<int32_t>(tokens);
  const ScreenGemmCuda problem{
      .tokens = tokens,
      .width = width,
      .ffn = ffn,
      .x = {const_cast<int8_t*>(device_x.data()), const_cast<TokenBound*>(device_bounds.data())},
      .gate = {.values = device_w.data(), .spread = device_spread.data()},
      .out = {const_cast<uint32_t*>(words.data()), const_cast<int32_t*>(counts.data())}};
  screen_gemm_cuda(ctx, problem);
  stream.synchronize();
  const auto got = download(words);
  const auto got_counts = download(counts);
  for (int64_t t = 0; t < tokens; t += row_step) {
    int32_t count = 0;
    for (int64_t n = 0; n < tiles * 256; ++n) {
      const int64_t i = n % 256 / 8, word = n % 8;
      const bool bit = got[static_cast<size_t>((t * tiles + n / 256) * 8 + word)] >> i & 1;
      bool want = false;
      if (n < ffn) {
        int64_t sum = 0;
        for (int64_t d = 0; d < width; ++d) {
          sum += x[static_cast<size_t>(t * width + d)] * w[static_cast<size_t>(n * width + d)];
        }
        const TokenBound& bound = bounds[static_cast<size_t>(t)];
        want = (sum << screen_shift(width)) + bound.base +
                   int64_t{bound.slope} * spread[static_cast<size_t>(n)] >=
               0;
      }
      ASSERT_EQ(bit, want) << "token " << t << " neuron " << n;
      count += want;
    }
    ASSERT_EQ(got_counts[static_cast<size_t>(t)], count) << "token " << t;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, ScreenGemmCudaTest,
    testing::Values(ScreenCase{1, 16, 8}, ScreenCase{127, 48, 264}, ScreenCase{129, 144, 520},
                    ScreenCase{300, 512, 1000}, ScreenCase{1000, 2048, 5632, 97},
                    ScreenCase{2049, 272, 1032, 31}, ScreenCase{16384, 128, 5632, 1001},
                    ScreenCase{200, 8192, 256, 41}, ScreenCase{70, 16, 70000, 13}));

// --- The layer ---

struct ScreenedLayer {
  const char* name;
  int64_t tokens, width, ffn;
  double shift;             // of the gates, in standard deviations
  int64_t heavy_every = 0;  // every so many rows fire mostly; 0: none
  bool squared = false, add = false;
};

// Gates of standard deviation 1 and mean `shift`, by a direction that all rows of x share. w_down
// maps neurons to columns of y, so that y of F up to D shows every bit of h.
struct LayerOperands {
  std::vector<__nv_bfloat16> x, gate, up, down, y;

  explicit LayerOperands(const ScreenedLayer& c)
      : x(random_bf16(c.tokens * c.width, 1)),
        gate(random_bf16(c.ffn * c.width, 2, 0.02f)),
        up(random_bf16(c.ffn * c.width, 3, 0.05f)),
        down(static_cast<size_t>(c.ffn * c.width), __float2bfloat16(0.0f)),
        y(random_bf16(c.tokens * c.width, 4)) {
    const double deviation = 0.02 * std::sqrt(2.0 * static_cast<double>(c.width));
    const double step = c.shift * deviation / static_cast<double>(c.width);
    for (int64_t i = 0; i < c.tokens * c.width; ++i) {
      const bool heavy = c.heavy_every > 0 && i / c.width % c.heavy_every == 0;
      auto& value = x[static_cast<size_t>(i)];
      value = __float2bfloat16(__bfloat162float(value) + (heavy ? -1.0f : 1.0f));
    }
    for (auto& value : gate) {
      value = __float2bfloat16(__bfloat162float(value) + static_cast<float>(step));
    }
    for (int64_t n = 0; n < c.ffn; ++n) {
      down[static_cast<size_t>(n * c.width + n % c.width)] = __float2bfloat16(1.0f);
    }
  }
};

struct LayerResult {
  std::vector<__nv_bfloat16> y;
  ActivityCuda activity;
};

// The layer on the device, through the gate GEMM and through both screens.
struct DeviceLayer {
  ScreenedLayer spec;
  LayerOperands host;
  DeviceBuffer<__nv_bfloat16> x, gate, up, down;
  TileUnionWorkspace workspace;

  explicit DeviceLayer(const ScreenedLayer& c) : DeviceLayer(c, LayerOperands(c)) {}
  DeviceLayer(const ScreenedLayer& c, const LayerOperands& operands)
      : spec(c),
        host(operands),
        x(upload(host.x)),
        gate(upload(host.gate)),
        up(upload(host.up)),
        down(upload(host.down)),
        workspace(c.tokens, c.ffn) {}

  LayerResult tile_union(CudaContext& ctx, const CudaStream& stream) {
    const TwellShape shape{spec.tokens, spec.ffn, 256, 8};
    const auto words = poisoned<uint32_t>(shape.words());
    const auto spill = poisoned<uint16_t>(shape.max_spill_slots() * shape.tile);
    const auto nnz = poisoned<int32_t>(shape.rows);
    const auto y = upload(host.y);
    const auto activity = upload(std::vector<ActivityCuda>(1));
    GateGemmCuda gemm;
    gemm.tokens = spec.tokens;
    gemm.width = spec.width;
    gemm.ffn = spec.ffn;
    gemm.x = x.data();
    gemm.w_gate = gate.data();
    gemm.out = {shape, const_cast<uint32_t*>(words.data()),
                reinterpret_cast<BF16*>(const_cast<uint16_t*>(spill.data())),
                shape.max_spill_slots(), const_cast<int32_t*>(nnz.data())};
    gate_gemm_cuda(ctx, gemm);
    SparseUpDownCuda problem;
    problem.tokens = spec.tokens;
    problem.width = spec.width;
    problem.ffn = spec.ffn;
    problem.gate = gemm.out;
    problem.x = x.data();
    problem.w_up = up.data();
    problem.w_down = down.data();
    problem.y = const_cast<__nv_bfloat16*>(y.data());
    problem.add = spec.add;
    problem.squared = spec.squared;
    problem.activity = const_cast<ActivityCuda*>(activity.data());
    tile_union_up_down_cuda(ctx, problem, workspace);
    stream.synchronize();
    return {download(y), download(activity)[0]};
  }

  LayerResult screened(CudaContext& ctx, const CudaStream& stream, ScreenBound bound,
                       int graph_replays = 0) {
    const int64_t tiles = ceil_div(spec.ffn, 256);
    const auto gate8 = poisoned<int8_t>(spec.ffn * spec.width);
    const auto x8 = poisoned<int8_t>(spec.tokens * spec.width);
    const auto spread = poisoned<int32_t>(tiles * 256);
    const auto rounding = poisoned<float>(1);
    const auto bounds = poisoned<TokenBound>(spec.tokens);
    const auto words = poisoned<uint32_t>(spec.tokens * tiles * 8);
    const auto counts = poisoned<int32_t>(spec.tokens);
    const auto y = upload(host.y);
    const auto activity = upload(std::vector<ActivityCuda>(1));
    const RotatedRowsCuda rows{const_cast<int8_t*>(x8.data()),
                               const_cast<TokenBound*>(bounds.data())};
    TWELL_CUDA_CHECK(launch_rotate_gate({.neurons = spec.ffn,
                                         .width = spec.width,
                                         .w_gate = gate.data(),
                                         .values = const_cast<int8_t*>(gate8.data()),
                                         .spread = const_cast<int32_t*>(spread.data()),
                                         .rounding = const_cast<float*>(rounding.data()),
                                         .bound = bound},
                                        ctx.stream()));
    const auto run = [&] {
      TWELL_CUDA_CHECK(launch_rotate_rows({.tokens = spec.tokens,
                                           .width = spec.width,
                                           .x = x.data(),
                                           .rotated = rows,
                                           .rounding = rounding.data(),
                                           .bound = bound},
                                          ctx.stream()));
      screened_ffn_cuda(
          ctx,
          {.tokens = spec.tokens,
           .width = spec.width,
           .ffn = spec.ffn,
           .rotated = rows,
           .screen = {gate8.data(), spread.data(), rounding.data(), bound},
           .x = x.data(),
           .w_gate = gate.data(),
           .w_up = up.data(),
           .w_down = down.data(),
           .y = const_cast<__nv_bfloat16*>(y.data()),
           .add = spec.add,
           .squared = spec.squared,
           .candidates = {const_cast<uint32_t*>(words.data()), const_cast<int32_t*>(counts.data())},
           .activity = const_cast<ActivityCuda*>(activity.data())},
          workspace);
    };
    if (graph_replays > 0) {
      stream.synchronize();
      replay_as_graph(stream, graph_replays, run);
    } else {
      run();
      stream.synchronize();
    }
    return {download(y), download(activity)[0]};
  }
};

bool same_bits(const LayerResult& a, const LayerResult& b) {
  return std::memcmp(a.y.data(), b.y.data(), a.y.size() * sizeof(a.y[0])) == 0;
}

class ScreenedFfnCudaTest : public testing::TestWithParam<ScreenedLayer> {};

// Each neuron has a column of y of its own, so that y has the bits of h whatever the union.
TEST_P(ScreenedFfnCudaTest, HasTheBitsOfTheGateGemm) {
  TWELL_HOPPER_TEST();
  DeviceLayer layer(GetParam());
  const LayerResult want = layer.tile_union(ctx, stream);
  for (const ScreenBound bound : {ScreenBound::kStrict, ScreenBound::kProbabilistic}) {
    const LayerResult got = layer.screened(ctx, stream, bound);
    EXPECT_TRUE(same_bits(got, want)) << static_cast<int>(bound);
    EXPECT_EQ(got.activity.tokens, want.activity.tokens);
    EXPECT_EQ(got.activity.nnz, want.activity.nnz);
    EXPECT_GT(got.activity.candidate_unions, 0u);
    EXPECT_GE(got.activity.candidate_union_neurons, want.activity.union_neurons);
    EXPECT_TRUE(same_bits(layer.screened(ctx, stream, bound), got)) << "repeated";
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ScreenedFfnCudaTest,
                         testing::Values(ScreenedLayer{"OneToken", 1, 64, 64, -1.0},
                                         ScreenedLayer{"Ragged", 127, 144, 136, -2.0},
                                         ScreenedLayer{"OverATile", 129, 528, 520, -2.5},
                                         ScreenedLayer{"NothingFires", 300, 256, 256, -9.0},
                                         ScreenedLayer{"EverythingFires", 200, 256, 256, 9.0},
                                         ScreenedLayer{"HeavyRows", 1000, 1024, 1000, -2.5, 100},
                                         ScreenedLayer{"ManyHeavyRows", 1000, 512, 512, -2.5, 5},
                                         ScreenedLayer{"Squared", 300, 512, 512, -2.0, 0, true},
                                         ScreenedLayer{"Added", 300, 512, 512, -2.0, 70, false,
                                                       true},
                                         ScreenedLayer{"ManyTokens", 20000, 256, 256, -2.5, 1000}),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(ScreenedFfnCuda, ManyNeuronsEqualTheGateGemmUpToTheOrderOfSums) {
  TWELL_HOPPER_TEST();
  DeviceLayer layer({"wide F", 700, 512, 8200, -3.0, 90});
  const LayerResult want = layer.tile_union(ctx, stream);
  const LayerResult got = layer.screened(ctx, stream, ScreenBound::kStrict);
  EXPECT_EQ(got.activity.nnz, want.activity.nnz);
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < got.y.size(); ++i) {
    const double a = __bfloat162float(got.y[i]), b = __bfloat162float(want.y[i]);
    difference += (a - b) * (a - b);
    size += b * b;
  }
  EXPECT_LE(std::sqrt(difference), std::ldexp(std::sqrt(size), -9));
}

TEST(ScreenedFfnCuda, RowsThatAreNotFiniteGiveWhatTheGateGemmGives) {
  TWELL_HOPPER_TEST();
  const ScreenedLayer spec{"not finite", 300, 256, 256, -2.0};
  LayerOperands operands(spec);
  const float infinity = std::numeric_limits<float>::infinity();
  operands.x[5 * 256 + 7] = __float2bfloat16(infinity);
  operands.x[130 * 256 + 9] = __float2bfloat16(std::numeric_limits<float>::quiet_NaN());
  operands.gate[3 * 256 + 1] = __float2bfloat16(-infinity);
  operands.gate[200 * 256 + 2] = __float2bfloat16(std::numeric_limits<float>::quiet_NaN());
  std::fill_n(operands.x.begin() + 9 * 256, 256, __float2bfloat16(0.0f));
  DeviceLayer layer(spec, operands);
  const LayerResult want = layer.tile_union(ctx, stream);
  const LayerResult got = layer.screened(ctx, stream, ScreenBound::kStrict);
  EXPECT_EQ(got.activity.nnz, want.activity.nnz);
  for (size_t i = 0; i < got.y.size(); ++i) {
    const float a = __bfloat162float(got.y[i]), b = __bfloat162float(want.y[i]);
    ASSERT_TRUE(a == b || (std::isnan(a) && std::isnan(b)))
        << "row " << i / 256 << " column " << i % 256 << ": " << a << ", expected " << b;
  }
}

TEST(ScreenedFfnCuda, ReplaysAsAGraph) {
  TWELL_HOPPER_TEST();
  DeviceLayer layer({"graph", 500, 512, 512, -2.5, 60});
  const LayerResult direct = layer.screened(ctx, stream, ScreenBound::kProbabilistic);
  const LayerResult replayed = layer.screened(ctx, stream, ScreenBound::kProbabilistic, 3);
  EXPECT_TRUE(same_bits(direct, replayed));
  EXPECT_EQ(replayed.activity.nnz, 3 * direct.activity.nnz);
}

TEST(ScreenedFfnCuda, RefusesWhatItCannotDo) {
  TWELL_HOPPER_TEST();
  ScreenGemmCuda odd;
  odd.tokens = 4;
  odd.width = 24;
  odd.ffn = 256;
  EXPECT_THAT([&] { screen_gemm_cuda(ctx, odd); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("24")));
  TileUnionWorkspace workspace(64, 256);
  EXPECT_THROW(screened_ffn_cuda(ctx, {.tokens = 100, .width = 64, .ffn = 256}, workspace), Error);
}

// What a check of the screen counts where some of the gate's non-zeros are no candidates.
TEST(ScreenCheckCuda, CountsMisses) {
  TWELL_HOPPER_TEST();
  const TwellShape shape{.rows = 2, .cols = 520, .tile = 256, .compression = 8};
  // Row 0 has neurons 3, 200 and 519; row 1's first tile is spilled, with the even neurons.
  std::vector<uint32_t> packed(static_cast<size_t>(shape.words()), 0);
  std::vector<uint16_t> spill(256, 0);
  const auto put = [&](int64_t row, int64_t tile, std::vector<uint32_t> values) {
    std::copy(values.begin(), values.end(), packed.begin() + shape.offset(row, tile));
  };
  constexpr uint32_t kOne = 0x3f800000;
  put(0, 0, {2, kOne | 3, kOne | 200});
  put(0, 2, {1, kOne | 519});
  put(1, 0, {128, 0});
  for (size_t n = 0; n < 256; n += 2) spill[n] = 0x3f80;
  // All are candidates but (0, 200), (0, 519), (1, 0) and (1, 254); and (1, 1), which is none.
  std::vector<uint32_t> words(2 * 3 * 8, ~0u);
  const auto clear = [&](size_t row, size_t n) {
    words[(row * 3 + n / 256) * 8 + n % 8] &= ~(1u << (n % 256 / 8));
  };
  clear(0, 200), clear(0, 519), clear(1, 0), clear(1, 254), clear(1, 1);
  const auto device_packed = upload(packed);
  const auto device_spill = upload(spill);
  const auto device_words = upload(words);
  const auto activity = upload(std::vector<ActivityCuda>(1));
  const TwellPacked gate{
      .shape = shape,
      .words = const_cast<uint32_t*>(device_packed.data()),
      .spill = reinterpret_cast<BF16*>(const_cast<uint16_t*>(device_spill.data())),
      .spill_slots = 1};
  TWELL_CUDA_CHECK(launch_check_screen(gate, device_words.data(),
                                       const_cast<ActivityCuda*>(activity.data()), ctx.stream()));
  stream.synchronize();
  const ActivityCuda counts = download(activity)[0];
  EXPECT_EQ(counts.checked_pairs, 131u);
  EXPECT_EQ(counts.missed_pairs, 4u);
  EXPECT_EQ(counts.nnz, 0u);
}

}  // namespace
}  // namespace twell
