// SPDX-License-Identifier: Apache-2.0
// down in e4m3 alone: blocks of h with exponents of their own, against sums in f64 of what they
// stand for.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"
#include "twell/format/byte_matrix.h"
#include "twell/ops/ffn/tile_union/tile_union_kernels.h"

namespace twell::tile_union {
namespace {

constexpr int kFfn = 1100, kBlocksOfTile = (kFfn + kBlock - 1) / kBlock;
// Rows of up's items: their exponents are the same.
constexpr int kItemBlocks = kMaxChunkBlocks;

struct Case {
  const char* name;
  int width;
  std::vector<int> unions;  // neurons of each tile
  int apart;                // exponents are -apart .. apart
  bool add = false, mapped = false;
  int ctas = 0;      // 0: one per SM
  bool nan = false;  // some tokens have a NaN, alone in its item or beside others
};

uint32_t draw(uint64_t stream, size_t index) {
  return philox(21, stream, static_cast<uint64_t>(index))[0];
}
// Any e4m3 but NaN.
uint8_t random_byte(uint64_t stream, size_t index) {
  const auto byte = static_cast<uint8_t>(draw(stream, index));
  return (byte & 0x7f) == 0x7f ? byte ^ 0x40 : byte;
}
float value_of(uint8_t byte) {
  static const std::array<float, 256> kValues = [] {
    std::array<float, 256> values;
    for (size_t i = 0; i < values.size(); ++i) values[i] = e4m3_to_float(static_cast<uint8_t>(i));
    return values;
  }();
  return kValues[byte];
}

size_t at(int64_t row, int64_t cols, int64_t col) { return static_cast<size_t>(row * cols + col); }

// Where ByteBlock has a token's neuron, by its position in the block.
size_t place(int token, int position) {
  const int in_piece = position % 16;
  const int byte = in_piece % 8 / 2 * 4 + in_piece / 8 * 2 + in_piece % 2;
  return static_cast<size_t>(token * kBlock + (position / 16 ^ token / 2 % 4) * 16 + byte);
}

class Problem {
 public:
  explicit Problem(const Case& c)
      : c_(c),
        tiles_(static_cast<int>(c.unions.size())),
        ids_(static_cast<size_t>(tiles_) * kBlocksOfTile * kBlock, -1),
        image_(static_cast<size_t>(tiles_) * kBlocksOfTile * ByteBlock::kBytes),
        h_(static_cast<size_t>(tiles_) * kTileTokens * kFfn),
        weight_(static_cast<size_t>(kFfn) * static_cast<size_t>(c.width)),
        scales_(static_cast<size_t>(c.width)) {
    for (size_t i = 0; i < weight_.size(); ++i) weight_[i] = random_byte(1, i);
    for (size_t i = 0; i < scales_.size(); ++i) {
      scales_[i] = std::ldexp(1.0f + static_cast<float>(draw(2, i) % 1000) / 1000.0f, -7);
    }
    for (int tile = 0; tile < tiles_; ++tile) make_tile(tile);
    start_ = to_bf16s(std::vector<float>(static_cast<size_t>(rows() * c.width), 3.0f));
    upload_all();
  }

  int64_t rows() const { return int64_t{tiles_} * kTileTokens; }
  // The row of y of a tile's token, or -1.
  int64_t row(int tile, int token) const {
    const int64_t own = tokens_[at(tile, kTileTokens, token)];
    return own < 0 || !c_.mapped ? own : rows() - 1 - own;
  }

  std::vector<__nv_bfloat16> run(CudaContext& ctx) {
    const auto y = upload(start_);
    const auto taken = upload(std::vector<int32_t>(1));
    Down down{};
    down.tiles = tiles();
    down.weight_bytes = device_weight_.data();
    down.y_scales = device_scales_.data();
    down.y = y.data();
    down.taken = taken.data();
    down.width = c_.width;
    down.add = c_.add;
    down.y_rows = c_.mapped ? y_rows_.data() : nullptr;
    const int ctas = c_.ctas > 0 ? c_.ctas : ctx.multiprocessors();
    TWELL_CUDA_CHECK(launch_byte_down_sm90(down, ctas, ctx.stream()));
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
    return download(y);
  }

  // y is rounded to bf16, and again when it is added to. The tensor cores add with at least 13
  // bits, 32 neurons at a time.
  void check(const std::vector<__nv_bfloat16>& y) const {
    std::vector<bool> written(static_cast<size_t>(rows()));
    for (int tile = 0; tile < tiles_; ++tile) {
      const double steps = c_.unions[static_cast<size_t>(tile)] / 32.0 + 1.0;
      for (int token = 0; token < kTileTokens; ++token) {
        if (row(tile, token) < 0) continue;
        written[static_cast<size_t>(row(tile, token))] = true;
        for (int column = 0; column < c_.width; ++column) {
          const auto [sum, size] = reference(tile, token, column);
          const double before = c_.add ? 3.0 : 0.0;
          const double got = double{__bfloat162float(y[at(row(tile, token), c_.width, column)])};
          if (std::isnan(sum)) {
            ASSERT_TRUE(std::isnan(got)) << "tile " << tile << ", token " << token;
            continue;
          }
          const double bound =
              (std::abs(sum) + std::abs(sum + before)) * 0x1p-8 + size * steps * 0x1p-13;
          ASSERT_LE(std::abs(got - sum - before), bound)
              << "tile " << tile << ", token " << token << ", column " << column << ": " << got;
        }
      }
    }
    for (int64_t r = 0; r < rows(); ++r) {
      for (int column = 0; column < c_.width && !written[static_cast<size_t>(r)]; ++column) {
        ASSERT_EQ(__bfloat162float(y[at(r, c_.width, column)]), 3.0f) << "row " << r;
      }
    }
  }

 private:
  void make_tile(int tile) {
    const int neurons = c_.unions[static_cast<size_t>(tile)];
    std::vector<int32_t> some(kFfn);
    std::iota(some.begin(), some.end(), 0);
    for (size_t i = 0; i < some.size(); ++i) {
      std::swap(some[i], some[i + draw(3 + static_cast<uint64_t>(tile), i) % (some.size() - i)]);
    }
    std::copy_n(some.begin(), neurons, ids_.begin() + int64_t{tile} * kBlocksOfTile * kBlock);
    for (int token = 0; token < kTileTokens; ++token) {
      const bool none = (tile + 1 == tiles_ && token > 100) || (token == 5 && tile % 2 == 1);
      tokens_.push_back(none ? -1 : tile * kTileTokens + token);
      for (int n = 0; n < neurons; ++n) make_value(tile, token, n);
    }
  }
  // Some tokens have no active neuron in an item, and neurons are rarely active.
  void make_value(int tile, int token, int n) {
    const size_t of_item =
        at(tile, kTileTokens, token) * 100 + static_cast<size_t>(n / (kItemBlocks * kBlock));
    const bool none = draw(100, of_item) % 11 == 0;
    const int exponent =
        none ? ByteBlock::kNoExponent
             : static_cast<int>(draw(101, of_item) % static_cast<uint32_t>(2 * c_.apart + 1)) -
                   c_.apart;
    const size_t of_h = at(tile, kTileTokens, token) * kFfn + static_cast<size_t>(n);
    uint8_t byte = none || draw(102, of_h) % 4 != 0 ? 0 : random_byte(103, of_h);
    if (!none && n % (kItemBlocks * kBlock) == 0) byte = 0x78;  // an exponent is of a large value
    if (c_.nan && token % 17 == 3 && n == c_.unions[static_cast<size_t>(tile)] / 2) byte = 0x7f;
    uint8_t* const block =
        image_.data() + (int64_t{tile} * kBlocksOfTile + n / kBlock) * int64_t{ByteBlock::kBytes};
    block[place(token, n % kBlock)] = byte;
    block[ByteBlock::kValues + static_cast<uint32_t>(token)] = static_cast<uint8_t>(exponent);
    h_[of_h] = std::ldexp(double{value_of(byte)}, none ? 0 : exponent);
  }

  struct Sum {
    double value = 0.0, size = 0.0;  // of the terms, and of their magnitudes
  };
  Sum reference(int tile, int token, int column) const {
    Sum sum;
    for (int n = 0; n < c_.unions[static_cast<size_t>(tile)]; ++n) {
      const double h = h_[at(tile, kTileTokens, token) * kFfn + static_cast<size_t>(n)];
      if (h == 0.0) continue;
      const int id = ids_[at(tile, kBlocksOfTile * kBlock, n)];
      const double term = h * double{value_of(weight_[at(id, c_.width, column)])};
      sum.value += term;
      sum.size += std::abs(term);
    }
    const double scale = double{scales_[static_cast<size_t>(column)]};
    return {sum.value * scale, sum.size * scale};
  }

  void upload_all() {
    std::vector<int32_t> first, order, ready, y_rows;
    for (int tile = 0; tile < tiles_; ++tile) {
      first.push_back(tile * kBlocksOfTile);
      order.push_back(tiles_ - 1 - tile);
      ready.push_back(2 * ((c_.unions[static_cast<size_t>(tile)] + kBlock - 1) / kBlock));
    }
    for (int64_t r = 0; r < rows(); ++r) y_rows.push_back(static_cast<int32_t>(rows() - 1 - r));
    Counts counts{};
    counts.tiles = tiles_;
    counts.complete = 1;
    counts_ = upload(std::vector<Counts>{counts});
    unions_ = upload(std::vector<int32_t>(c_.unions.begin(), c_.unions.end()));
    first_ = upload(first);
    order_ = upload(order);
    ready_ = upload(ready);
    y_rows_ = upload(y_rows);
    device_tokens_ = upload(tokens_);
    device_ids_ = upload(ids_);
    device_image_ = upload(image_);
    device_weight_ = upload(weight_);
    device_scales_ = upload(scales_);
  }
  Tiles tiles() const {
    Tiles tiles{};
    tiles.tokens = device_tokens_.data();
    tiles.union_size = unions_.data();
    tiles.first_block = first_.data();
    tiles.ready = ready_.data();
    tiles.union_ids = device_ids_.data();
    tiles.activations = reinterpret_cast<__nv_bfloat16*>(device_image_.data());
    tiles.order = order_.data();
    tiles.counts = counts_.data();
    tiles.blocks = kBlocksOfTile;
    tiles.max_tiles = tiles_;
    return tiles;
  }

  Case c_;
  int tiles_;
  std::vector<int32_t> tokens_, ids_;
  std::vector<uint8_t> image_;
  std::vector<double> h_;  // [tiles, tokens, positions]
  std::vector<uint8_t> weight_;
  std::vector<float> scales_;
  std::vector<__nv_bfloat16> start_;
  DeviceBuffer<Counts> counts_;
  DeviceBuffer<int32_t> unions_, first_, order_, ready_, y_rows_, device_tokens_, device_ids_;
  DeviceBuffer<uint8_t> device_image_, device_weight_;
  DeviceBuffer<float> device_scales_;
};

class ByteDownCudaTest : public testing::TestWithParam<Case> {};

TEST_P(ByteDownCudaTest, EqualsSumsInF64) {
  TWELL_HOPPER_TEST();
  Problem problem(GetParam());
  const auto y = problem.run(ctx);
  problem.check(y);
  const auto again = problem.run(ctx);
  EXPECT_EQ(std::memcmp(again.data(), y.data(), y.size() * sizeof(y[0])), 0);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, ByteDownCudaTest,
    testing::Values(Case{"one", 256, {64}, 0}, Case{"narrow", 16, {1, 0, 63, 64, 65}, 2},
                    Case{"ragged", 272, {0, 1, 63, 64, 65, 1000, 129, 192, 193}, 4},
                    Case{"add", 400, {0, 1, 65, 577, 1100}, 4, true, true},
                    // The later items of a CTA find the ring buffer in use.
                    Case{"few_ctas", 528, {1000, 5, 0, 700, 512, 513}, 8, false, true, 3},
                    // Sums change units by up to 2^50, and by more than kLargestFall.
                    Case{"far_apart", 48, {1000, 1100, 500, 192, 400}, 25},
                    Case{"very_far_apart", 48, {1000, 1100, 500, 192, 400}, 45},
                    // Units that fell as far as exponents do would overflow.
                    Case{"farthest_apart", 48, {1000, 1100, 500, 192, 400}, 95},
                    Case{"nan", 48, {1000, 1, 64, 65, 400}, 4, false, false, 0, true}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace twell::tile_union
