// SPDX-License-Identifier: Apache-2.0
#include "twell/format/ell.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "twell/base/buffer.h"
#include "twell/base/error.h"

namespace twell {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Storage {
  Storage(int64_t rows, int64_t cols, int64_t width, int64_t tail_capacity)
      : column(rows * width),
        value(rows * width),
        row_nnz(rows),
        tail(tail_capacity),
        tail_values(tail_capacity * cols) {
    for (uint32_t& c : column.span()) c = 0xffffffffu;
    for (float& v : value.span()) v = kNan;
    for (float& v : tail_values.span()) v = kNan;
    ell = {rows,         cols,           width,       column.data(),
           value.data(), row_nnz.data(), tail.data(), tail_values.data(),
           tail_capacity};
  }
  Buffer<uint32_t> column;
  Buffer<float> value;
  Buffer<int32_t> row_nnz, tail;
  Buffer<float> tail_values;
  Ell ell;
};

// Row r has nnz[r] non-zeros, exact in bf16.
std::vector<float> with_counts(int64_t cols, const std::vector<int64_t>& nnz) {
  std::vector<float> dense(nnz.size() * static_cast<size_t>(cols), 0.0f);
  for (size_t row = 0; row < nnz.size(); ++row) {
    for (int64_t i = 0; i < nnz[row]; ++i) {
      dense[row * static_cast<size_t>(cols) + static_cast<size_t>(i * 7 % cols)] =
          static_cast<float>(i % 64 + 1);
    }
  }
  return dense;
}

TEST(Ell, RoundTripsRowsBelowAtAndAboveTheWidth) {
  const int64_t cols = 300;
  const std::vector<int64_t> counts = {0, 15, 16, 17, 300, 1};
  std::vector<float> dense = with_counts(cols, counts);
  Storage packed(6, cols, 16, 2);
  ell_pack_reference(ConstMatrixF(dense.data(), 6, cols), packed.ell);
  EXPECT_EQ(packed.ell.tail_rows, 2);
  EXPECT_EQ(packed.tail[0], 3);
  EXPECT_EQ(packed.tail[1], 4);
  for (int64_t row = 0; row < 6; ++row) {
    EXPECT_EQ(packed.row_nnz[row], counts[static_cast<size_t>(row)]);
  }
  std::vector<float> back(dense.size(), kNan);
  ell_unpack_reference(packed.ell, MatrixF(back.data(), 6, cols));
  EXPECT_EQ(back, dense);
}

TEST(Ell, RefusesATailThatIsTooSmall) {
  std::vector<float> dense = with_counts(100, {9, 9});
  Storage packed(2, 100, 8, 1);
  EXPECT_THROW(ell_pack_reference(ConstMatrixF(dense.data(), 2, 100), packed.ell), Error);
}

template <typename Word>
void expect_converts() {
  const int64_t cols = 600;
  std::vector<float> dense = with_counts(cols, {0, 5, 40, 600, 128});
  const TwellShape shape{5, cols, 256, 8};
  Buffer<Word> words(shape.words());
  Buffer<typename TwellWord<Word>::Value> spill(shape.max_spill_slots() * shape.tile);
  const Twell<Word> twell{shape, words.data(), spill.data(), shape.max_spill_slots(), nullptr};
  twell_pack_reference(ConstMatrixF(dense.data(), 5, cols), twell);

  Storage ell(5, cols, 64, 5);
  ell_from_twell(twell, ell.ell);
  EXPECT_EQ(ell.ell.tail_rows, 2);
  for (Word& word : words.span()) word = 0;
  twell_from_ell(ell.ell, twell);
  std::vector<float> back(dense.size(), kNan);
  twell_unpack_reference(twell, MatrixF(back.data(), 5, cols));
  EXPECT_EQ(back, dense);
}

TEST(Ell, ConvertsFromAndToTwell) {
  expect_converts<uint32_t>();
  expect_converts<uint64_t>();
}

}  // namespace
}  // namespace twell
