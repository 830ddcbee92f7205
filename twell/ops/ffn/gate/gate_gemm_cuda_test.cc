// SPDX-License-Identifier: Apache-2.0
// Inputs are small integers, so that every sum is exact in f32 and the packed values have one right
// answer to the bit. Every test runs the Hopper kernel and the portable one.
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/base/rng.h"
#include "twell/base/test_bf16.h"

namespace twell {
namespace {

struct Implementation {
  const char* name;
  void (*run)(CudaContext&, const GateGemmCuda&);
  bool bytes = false;  // on operands in e4m3, with scales of powers of two
};
float scale_of_token(int64_t row) { return std::ldexp(0.5f, static_cast<int>(row % 3)); }
float scale_of_neuron(int64_t column) { return std::ldexp(2.0f, static_cast<int>(column % 7) - 3); }
constexpr Implementation kHopper{"Hopper", gate_gemm_cuda};
constexpr Implementation kHopperBytes{"HopperBytes", gate_gemm_cuda, true};
constexpr Implementation kPortable{"Portable", gate_gemm_sm80_cuda};

#define GPU_TEST_OF(implementation)                                               \
  TWELL_GPU_TEST();                                                               \
  if ((implementation).run == gate_gemm_cuda && ctx.compute_capability() != 90) { \
    GTEST_SKIP() << ctx.device_name() << " is not a Hopper GPU";                  \
  }

// Small integers, which e4m3 holds exactly up to 16.
std::vector<uint8_t> to_bytes(const std::vector<int>& values) {
  std::vector<uint8_t> bytes;
  for (const int value : values) bytes.push_back(to_e4m3(static_cast<float>(value)));
  return bytes;
}

// A gate GEMM with its buffers, poisoned before each run.
struct PackedGate {
  TwellShape shape;
  std::vector<uint32_t> words;
  std::vector<uint16_t> spill;
  std::vector<int32_t> row_nnz;
  TwellPacked packed;  // of the host copies
  bool bytes;

  PackedGate(const Implementation& gate_gemm, CudaContext& ctx, const CudaStream& stream,
             const TwellShape& shape_in, int64_t width, const std::vector<int>& x,
             const std::vector<int>& w, int graph_replays = 0)
      : shape(shape_in), bytes(gate_gemm.bytes) {
    const auto device_x = upload(to_bf16s(x));
    const auto device_w = upload(to_bf16s(w));
    const auto device_words = poisoned<uint32_t>(shape.words());
    const auto device_spill = poisoned<uint16_t>(shape.max_spill_slots() * shape.tile);
    const auto device_nnz = poisoned<int32_t>(shape.rows);
    GateGemmCuda problem;
    problem.tokens = shape.rows;
    problem.width = width;
    problem.ffn = shape.cols;
    problem.x = device_x.data();
    problem.w_gate = device_w.data();
    DeviceBuffer<uint8_t> x_bytes, w_bytes;
    DeviceBuffer<float> x_scales, w_scales;
    if (bytes) {
      std::vector<float> of_x, of_w;
      for (int64_t row = 0; row < shape.rows; ++row) of_x.push_back(scale_of_token(row));
      for (int64_t n = 0; n < shape.cols; ++n) of_w.push_back(scale_of_neuron(n));
      x_bytes = upload(to_bytes(x));
      w_bytes = upload(to_bytes(w));
      x_scales = upload(of_x);
      w_scales = upload(of_w);
      problem.x = problem.w_gate = nullptr;
      problem.x_bytes = {x_bytes.data(), x_scales.data()};
      problem.w_gate_bytes = {w_bytes.data(), w_scales.data()};
    }
    problem.out = {shape, device_words.data(), reinterpret_cast<BF16*>(device_spill.data()),
                   shape.max_spill_slots(), device_nnz.data()};
    if (graph_replays > 0) {
      replay_as_graph(stream, graph_replays, [&] { gate_gemm.run(ctx, problem); });
    } else {
      gate_gemm.run(ctx, problem);
      stream.synchronize();
    }
    words = download(device_words);
    spill = download(device_spill);
    row_nnz = download(device_nnz);
    packed = {shape, words.data(), reinterpret_cast<BF16*>(spill.data()), shape.max_spill_slots(),
              row_nnz.data()};
  }

  // Every row of `rows` against relu(x w^T).
  void check(int64_t width, const std::vector<int>& x, const std::vector<int>& w,
             int64_t row_step) const {
    std::vector<float> got(static_cast<size_t>(shape.cols));
    for (int64_t row = 0; row < shape.rows; row += row_step) {
      std::fill(got.begin(), got.end(), 0.0f);
      int64_t count = 0;
      twell_for_each(packed, row, [&](int64_t column, float value) {
        ASSERT_TRUE(column >= 0 && column < shape.cols) << "row " << row << " column " << column;
        ASSERT_EQ(got[static_cast<size_t>(column)], 0.0f) << "stored twice";
        got[static_cast<size_t>(column)] = value;
        ++count;
      });
      ASSERT_EQ(row_nnz[static_cast<size_t>(row)], count) << "row " << row;
      for (int64_t column = 0; column < shape.cols; ++column) {
        int sum = 0;
        for (int64_t k = 0; k < width; ++k) {
          sum +=
              x[static_cast<size_t>(row * width + k)] * w[static_cast<size_t>(column * width + k)];
        }
        const float scale = bytes ? scale_of_token(row) * scale_of_neuron(column) : 1.0f;
        const float want = to_float(to_bf16(scale * static_cast<float>(std::max(sum, 0))));
        ASSERT_EQ(got[static_cast<size_t>(column)], want) << "row " << row << " column " << column;
      }
    }
  }
};

// Entries in {-1, 0, 1}; x's first column is 1 and w's is `bias`, which sets the density.
void random_operands(const TwellShape& shape, int64_t width, int bias, std::vector<int>& x,
                     std::vector<int>& w) {
  x.resize(static_cast<size_t>(shape.rows * width));
  w.resize(static_cast<size_t>(shape.cols * width));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<int>(uniform_below(1, 0, i, 3)) - 1;
  for (size_t i = 0; i < w.size(); ++i) w[i] = static_cast<int>(uniform_below(1, 1, i, 3)) - 1;
  for (size_t i = 0; i < x.size(); i += static_cast<size_t>(width)) x[i] = 1;
  for (size_t i = 0; i < w.size(); i += static_cast<size_t>(width)) w[i] = bias;
}

struct GateCase {
  int64_t tokens, width, ffn;
  int32_t compression;
  int bias;
  int64_t row_step = 1;
};

class GateGemmCudaTest : public testing::TestWithParam<std::tuple<Implementation, GateCase>> {};

TEST_P(GateGemmCudaTest, PacksWhatTheDenseGateHas) {
  const Implementation& gate_gemm = std::get<0>(GetParam());
  GPU_TEST_OF(gate_gemm);
  const GateCase& c = std::get<1>(GetParam());
  const TwellShape shape{c.tokens, c.ffn, 256, c.compression};
  std::vector<int> x, w;
  random_operands(shape, c.width, c.bias, x, w);
  const PackedGate run(gate_gemm, ctx, stream, shape, c.width, x, w);
  run.check(c.width, x, w, c.row_step);
}

INSTANTIATE_TEST_SUITE_P(
    Bytes, GateGemmCudaTest,
    testing::Combine(testing::Values(kHopperBytes),
                     testing::Values(GateCase{1, 64, 256, 8, -3}, GateCase{127, 128, 512, 8, -16},
                                     GateCase{129, 80, 520, 8, 0}, GateCase{300, 192, 1000, 4, -5},
                                     GateCase{513, 256, 2048, 2, 0}, GateCase{200, 16, 256, 8, -1},
                                     GateCase{64, 1600, 8200, 8, -14, 7},
                                     GateCase{140, 64, 66000, 8, -15, 9},
                                     GateCase{2200, 80, 2048, 8, -8, 7},
                                     GateCase{65537, 64, 264, 8, -12, 331})),
    [](const auto& test) {
      const GateCase& c = std::get<1>(test.param);
      return fmt::format("{}_{}x{}x{}", std::get<0>(test.param).name, c.tokens, c.width, c.ffn);
    });

INSTANTIATE_TEST_SUITE_P(
    Shapes, GateGemmCudaTest,
    testing::Combine(testing::Values(kHopper, kPortable),
                     testing::Values(GateCase{1, 64, 256, 8, -3}, GateCase{127, 128, 512, 8, -20},
                                     GateCase{129, 72, 520, 8, 0}, GateCase{300, 192, 1000, 4, -5},
                                     GateCase{513, 256, 2048, 2, 0}, GateCase{200, 8, 256, 8, -1},
                                     GateCase{64, 1600, 8200, 8, -50, 7},
                                     GateCase{140, 64, 66000, 8, -15, 9},
                                     // On 132 SMs: 72 cluster tiles, 6 of them halved.
                                     GateCase{2200, 72, 2048, 8, -8, 7},
                                     GateCase{65537, 64, 264, 8, -12, 331})),
    [](const auto& test) {
      const GateCase& c = std::get<1>(test.param);
      return fmt::format("{}_{}x{}x{}", std::get<0>(test.param).name, c.tokens, c.width, c.ffn);
    });

class GateGemmPackingTest : public testing::TestWithParam<Implementation> {};
INSTANTIATE_TEST_SUITE_P(Implementations, GateGemmPackingTest, testing::Values(kHopper, kPortable),
                         [](const auto& test) { return std::string(test.param.name); });

// x is one-hot, so row m of the gate is column m of w: each row has a chosen occupancy per tile.
TEST_P(GateGemmPackingTest, TilesAroundCapacity) {
  GPU_TEST_OF(GetParam());
  for (const int32_t compression : {8, 4, 2}) {
    const TwellShape shape{40, 512, 256, compression};
    const int64_t width = 40;
    const int capacity = shape.capacity();
    const int occupancies[] = {0, 1, capacity - 1, capacity, capacity + 1, 255, 256};
    std::vector<int> x(static_cast<size_t>(shape.rows * width), 0);
    std::vector<int> w(static_cast<size_t>(shape.cols * width));
    for (int64_t row = 0; row < shape.rows; ++row) x[static_cast<size_t>(row * width + row)] = 1;
    for (int64_t column = 0; column < shape.cols; ++column) {
      for (int64_t row = 0; row < shape.rows; ++row) {
        const int active = occupancies[(row + column / 256) % 7];
        // Each row has a different run of neurons.
        const bool fires = (column * 37 + row * 11) % 256 < active;
        w[static_cast<size_t>(column * width + row)] =
            fires ? static_cast<int>(1 + (row + column) % 100) : -3;
      }
    }
    const PackedGate run(GetParam(), ctx, stream, shape, width, x, w);
    run.check(width, x, w, 1);
    for (int64_t row = 0; row < shape.rows; ++row) {
      for (int64_t tile = 0; tile < 2; ++tile) {
        EXPECT_EQ(run.packed.count(row, tile), occupancies[(row + tile) % 7]);
      }
    }
  }
}

TEST_P(GateGemmPackingTest, RepeatsBitForBitDirectlyAndAsAGraph) {
  GPU_TEST_OF(GetParam());
  const TwellShape shape{700, 1536, 256, 8};
  const int64_t width = 256;
  std::vector<int> x, w;
  random_operands(shape, width, -14, x, w);
  const PackedGate once(GetParam(), ctx, stream, shape, width, x, w);
  const PackedGate again(GetParam(), ctx, stream, shape, width, x, w);
  const PackedGate replayed(GetParam(), ctx, stream, shape, width, x, w, 3);
  EXPECT_EQ(once.words, again.words);
  EXPECT_EQ(once.spill, again.spill);
  EXPECT_EQ(once.words, replayed.words);
  EXPECT_EQ(once.row_nnz, replayed.row_nnz);
}

// Rows past the last token and neurons past the last one are read as zeros, and 0 x Inf is NaN:
// none of that may be stored. The buffers have guard zones of a tile of rows on both sides.
TEST_P(GateGemmPackingTest, StoresNothingOutsideWithInfAndNan) {
  GPU_TEST_OF(GetParam());
  constexpr uint16_t kInf = 0x7f80, kNan = 0x7fc0;
  for (const auto& [tokens, ffn] : {std::pair<int64_t, int64_t>{100, 17408}, {200, 17400}}) {
    const TwellShape shape{tokens, ffn, 256, 8};
    const int64_t width = 72, tiles = shape.tiles(), guard = 256 * tiles;
    std::vector<int> x, w;
    random_operands(shape, width, -12, x, w);
    auto special_w = to_bf16s(w);
    // Every third tile of neurons overflows, the others hold a few values that are not finite.
    for (int64_t n = 0; n < ffn; ++n) {
      if (n % 256 < (n / 256 % 3 == 0 ? 256 : 5)) {
        special_w[static_cast<size_t>(n * width)] = __ushort_as_bfloat16(n % 7 == 0 ? kNan : kInf);
      }
    }
    const auto device_w = upload(special_w);
    for (const bool special_x : {false, true}) {
      auto tokens_x = to_bf16s(x);
      if (special_x) tokens_x[static_cast<size_t>(3 * width + 5)] = __ushort_as_bfloat16(kInf);
      const auto device_x = upload(tokens_x);
      const auto words = poisoned<uint32_t>((tokens + 2 * 256) * tiles * shape.slots());
      const auto spill = poisoned<uint16_t>((tokens * tiles + 2 * guard) * shape.tile);
      const auto row_nnz = poisoned<int32_t>(tokens + 2 * 256);
      GetParam().run(ctx, {.tokens = tokens,
                           .width = width,
                           .ffn = ffn,
                           .x = device_x.data(),
                           .w_gate = device_w.data(),
                           .out = {shape, words.data() + guard * shape.slots(),
                                   reinterpret_cast<BF16*>(spill.data()) + guard * shape.tile,
                                   shape.max_spill_slots(), row_nnz.data() + 256}});
      stream.synchronize();
      const auto untouched = [](const auto& values, int64_t begin, int64_t count) {
        using Value = std::decay_t<decltype(values[0])>;
        for (int64_t i = begin; i < begin + count; ++i) {
          if (values[static_cast<size_t>(i)] != static_cast<Value>(-1)) return i;
        }
        return int64_t{-1};
      };
      auto host_words = download(words);
      auto host_spill = download(spill);
      auto host_nnz = download(row_nnz);
      EXPECT_EQ(untouched(host_words, 0, guard * shape.slots()), -1);
      EXPECT_EQ(
          untouched(host_words, (guard + tokens * tiles) * shape.slots(), guard * shape.slots()),
          -1);
      EXPECT_EQ(untouched(host_spill, 0, guard * shape.tile), -1);
      EXPECT_EQ(untouched(host_spill, (guard + tokens * tiles) * shape.tile, guard * shape.tile),
                -1);
      EXPECT_EQ(untouched(host_nnz, 0, 256), -1);
      EXPECT_EQ(untouched(host_nnz, 256 + tokens, 256), -1);
      const TwellPacked packed{shape, host_words.data() + guard * shape.slots(),
                               reinterpret_cast<BF16*>(host_spill.data()) + guard * shape.tile,
                               shape.max_spill_slots(), host_nnz.data() + 256};
      for (int64_t row = 0; row < tokens; ++row) {
        int64_t count = 0;
        twell_for_each(packed, row, [&](int64_t column, float) {
          EXPECT_TRUE(column >= 0 && column < ffn) << "row " << row << " column " << column;
          ++count;
        });
        ASSERT_EQ(packed.row_nnz[row], count) << "row " << row;
        ASSERT_GE(count, ffn / 3) << "row " << row;
      }
    }
  }
}

TEST_P(GateGemmPackingTest, RefusesWhatItCannotDo) {
  GPU_TEST_OF(GetParam());
  GateGemmCuda problem;
  problem.tokens = 4;
  problem.width = 12;
  problem.ffn = 256;
  problem.out.shape = {4, 256, 256, 8};
  problem.out.spill_slots = 4;
  EXPECT_THAT([&] { GetParam().run(ctx, problem); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("width 12")));
  problem.width = 16;
  problem.out.spill_slots = 3;
  EXPECT_THAT([&] { GetParam().run(ctx, problem); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("spill")));
}

}  // namespace
}  // namespace twell
