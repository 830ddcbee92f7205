// SPDX-License-Identifier: Apache-2.0
#include "twell/format/twell.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "twell/base/buffer.h"
#include "twell/base/error.h"
#include "twell/base/rng.h"

namespace twell {
namespace {

// Owns what a Twell view points to; poisoned, so that unwritten words show.
template <typename Word>
struct TwellStorage {
  explicit TwellStorage(const TwellShape& shape, int64_t spill_slots)
      : words(shape.words()), spill(spill_slots * shape.tile), row_nnz(shape.rows) {
    for (Word& word : words.span()) word = static_cast<Word>(0xdeadbeefdeadbeefULL);
    for (auto& value : spill.span()) {
      value = TwellWord<Word>::store(std::numeric_limits<float>::quiet_NaN());
    }
    view = {shape, words.data(), spill.data(), spill_slots, row_nnz.data()};
  }
  Buffer<Word> words;
  Buffer<typename TwellWord<Word>::Value> spill;
  Buffer<int32_t> row_nnz;
  Twell<Word> view;
};

// The first nnz[t] columns of each tile, spread by a stride coprime to the tile. Values are exact
// in bf16.
std::vector<float> row_with_counts(const TwellShape& shape, const std::vector<int64_t>& nnz) {
  std::vector<float> row(static_cast<size_t>(shape.cols), 0.0f);
  for (int64_t t = 0; t < shape.tiles(); ++t) {
    const int64_t begin = t * shape.tile;
    const int64_t width = std::min<int64_t>(shape.tile, shape.cols - begin);
    for (int64_t i = 0, placed = 0; placed < nnz[static_cast<size_t>(t)]; ++i) {
      const int64_t column = i * 37 % shape.tile;
      if (column >= width) continue;
      row[static_cast<size_t>(begin + column)] = static_cast<float>(1 + (begin + column) % 100);
      ++placed;
    }
  }
  return row;
}

template <typename Word>
class TwellTest : public testing::Test {};
using Words = testing::Types<uint32_t, uint64_t>;
TYPED_TEST_SUITE(TwellTest, Words);

TYPED_TEST(TwellTest, RoundTripsEveryOccupancy) {
  for (const int32_t compression : {2, 4, 8, 128}) {
    TwellShape shape{1, 5 * 256 + 40, 256, compression};
    const int64_t cap = shape.capacity();
    const std::vector<int64_t> counts = {0, cap - 1, cap, cap + 1, 256, std::min<int64_t>(40, cap)};
    std::vector<float> row = row_with_counts(shape, counts);
    TwellStorage<TypeParam> packed(shape, 2);
    ASSERT_EQ(twell_pack_reference(ConstMatrixF(row.data(), 1, shape.cols), packed.view), 2);
    int64_t total = 0;
    for (int64_t t = 0; t < shape.tiles(); ++t) {
      const int64_t count = counts[static_cast<size_t>(t)];
      EXPECT_EQ(packed.view.count(0, t), count);
      EXPECT_EQ(packed.view.spilled(0, t), count > cap);
      total += count;
    }
    EXPECT_EQ(packed.row_nnz[0], total);
    std::vector<float> back(row.size(), std::numeric_limits<float>::quiet_NaN());
    twell_unpack_reference(packed.view, MatrixF(back.data(), 1, shape.cols));
    EXPECT_EQ(back, row);
  }
}

TYPED_TEST(TwellTest, LastTilePartlyFilledAndFull) {
  TwellShape shape{2, 300, 256, 8};
  std::vector<float> dense(600, 1.5f);
  std::fill_n(dense.begin(), 300, 0.0f);
  dense[299] = 2.0f;
  TwellStorage<TypeParam> packed(shape, shape.max_spill_slots());
  twell_pack_reference(ConstMatrixF(dense.data(), 2, 300), packed.view);
  EXPECT_EQ(packed.view.count(0, 1), 1);
  EXPECT_EQ(packed.view.count(1, 1), 44);
  std::vector<float> back(600, -1.0f);
  twell_unpack_reference(packed.view, MatrixF(back.data(), 2, 300));
  EXPECT_EQ(back, dense);
}

TYPED_TEST(TwellTest, ColumnsBeyond65536) {
  TwellShape shape{1, 3 * 65536 + 100, 256, 8};
  std::vector<float> dense(static_cast<size_t>(shape.cols), 0.0f);
  for (const size_t column : {0u, 65535u, 65536u, 65537u, 131071u, 131072u, 196608u + 99u}) {
    dense[column] = static_cast<float>(column % 128 + 1);
  }
  std::fill_n(dense.begin() + 70000, 600, 3.0f);  // overflow in a tile past column 65,536
  TwellStorage<TypeParam> packed(shape, 4);
  twell_pack_reference(ConstMatrixF(dense.data(), 1, shape.cols), packed.view);
  std::vector<float> back(dense.size(), -1.0f);
  twell_unpack_reference(packed.view, MatrixF(back.data(), 1, shape.cols));
  EXPECT_EQ(back, dense);
}

TYPED_TEST(TwellTest, RandomDensities) {
  TwellShape shape{7, 1000, 128, 4};
  for (const float density : {0.0f, 0.01f, 0.25f, 0.5f, 1.0f}) {
    Buffer<float> dense(shape.rows * shape.cols);
    for (int64_t i = 0; i < dense.size(); ++i) {
      const float drawn = to_float(to_bf16(normal(2, 0, static_cast<uint64_t>(i))));
      dense[i] = uniform(1, 0, static_cast<uint64_t>(i)) < density ? drawn : 0.0f;
    }
    TwellStorage<TypeParam> packed(shape, shape.max_spill_slots());
    twell_pack_reference<TypeParam>(dense.matrix(shape.rows, shape.cols), packed.view);
    Buffer<float> back(dense.size());
    twell_unpack_reference(packed.view, back.matrix(shape.rows, shape.cols));
    for (int64_t i = 0; i < dense.size(); ++i) ASSERT_EQ(back[i], dense[i]) << i;
  }
}

TYPED_TEST(TwellTest, RefusesWhatDoesNotFit) {
  EXPECT_TRUE(twell_unsupported({4, 100, 256, 8}).empty());
  EXPECT_FALSE(twell_unsupported({4, 100, 200, 8}).empty());
  EXPECT_FALSE(twell_unsupported({4, 100, 256, 256}).empty());
  EXPECT_FALSE(twell_unsupported({4, 100, 131072, 8}).empty());
  EXPECT_FALSE(twell_unsupported({4, 0, 256, 8}).empty());
  TwellShape shape{1, 256, 256, 8};
  std::vector<float> full(256, 1.0f);
  TwellStorage<TypeParam> packed(shape, 0);
  EXPECT_THROW(twell_pack_reference(ConstMatrixF(full.data(), 1, 256), packed.view), Error);
}

// Words as other implementations write them: the count, then column | bf16 << 16.
TEST(TwellPackedLayout, Fixture) {
  TwellShape shape{1, 512, 256, 8};
  std::vector<float> dense(512, 0.0f);
  dense[3] = 1.0f;
  dense[255] = -2.5f;
  dense[256] = 0.15625f;
  TwellStorage<uint32_t> packed(shape, 0);
  twell_pack_reference(ConstMatrixF(dense.data(), 1, 512), packed.view);
  EXPECT_EQ(packed.words[0], 2u);
  EXPECT_EQ(packed.words[1], 0x3f800003u);
  EXPECT_EQ(packed.words[2], 0xc02000ffu);
  EXPECT_EQ(packed.words[32], 1u);
  EXPECT_EQ(packed.words[33], 0x3e200100u);
}

TEST(TwellWideLayout, Fixture) {
  TwellShape shape{1, 70000, 256, 8};
  std::vector<float> dense(70000, 0.0f);
  dense[69999] = 0.1f;
  TwellStorage<uint64_t> packed(shape, 0);
  twell_pack_reference(ConstMatrixF(dense.data(), 1, 70000), packed.view);
  const int64_t at = shape.offset(0, shape.tiles() - 1);
  EXPECT_EQ(packed.words[at], 1u);
  EXPECT_EQ(packed.words[at + 1], 0x3dcccccd0001116fULL);
}

}  // namespace
}  // namespace twell
