// SPDX-License-Identifier: Apache-2.0
#include "twell/format/statistics.h"

#include <gtest/gtest.h>

#include <vector>

#include "twell/base/buffer.h"
#include "twell/base/context.h"
#include "twell/base/error.h"
#include "twell/format/csr.h"

namespace twell {
namespace {

// Four rows over 10 columns: {1, 2, 8}, {}, {2}, {0, 1, 2, 3}.
Pattern example() {
  return {.cols = 10, .row_begin = {0, 3, 3, 4, 8}, .column = {1, 2, 8, 2, 0, 1, 2, 3}};
}

TEST(Statistics, UnionsOfTokens) {
  EXPECT_DOUBLE_EQ(mean_union(example(), 1), 2.0);
  EXPECT_DOUBLE_EQ(mean_union(example(), 2), 3.5);
  EXPECT_DOUBLE_EQ(mean_union(example(), 3), 3.5);  // {1, 2, 8} and {0, 1, 2, 3}
  EXPECT_DOUBLE_EQ(mean_union(example(), 64), 5.0);
  EXPECT_EQ(union_sizes(example(), 1), (std::vector<int64_t>{3, 0, 1, 4}));
  EXPECT_EQ(union_sizes(example(), 2), (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(union_sizes(example(), 3), (std::vector<int64_t>{3}));  // the fourth row is left out
  EXPECT_TRUE(union_sizes(example(), 64).empty());
}

TEST(Statistics, RowsAreCutAndPutTogether) {
  const Pattern all = example();
  const Pattern middle = slice_rows(all, 1, 2);
  EXPECT_EQ(middle.cols, 10);
  EXPECT_EQ(middle.row_begin, (std::vector<int64_t>{0, 0, 1}));
  EXPECT_EQ(middle.column, (std::vector<uint32_t>{2}));
  Pattern together{.cols = 10, .row_begin = {0}, .column = {}};
  for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 1}, {1, 2}, {3, 0}, {3, 1}}) {
    append_rows(slice_rows(all, begin, count), together);
  }
  EXPECT_EQ(together.row_begin, all.row_begin);
  EXPECT_EQ(together.column, all.column);
  EXPECT_THROW(slice_rows(all, 3, 2), Error);
  Pattern wider{.cols = 11, .row_begin = {0}, .column = {}};
  EXPECT_THROW(append_rows(all, wider), Error);
}

TEST(Statistics, FromTwellAndCsr) {
  std::vector<float> dense(3 * 520, 0.0f);
  for (size_t i = 0; i < 300; ++i) dense[i] = 1.0f;  // tiles 0 and 1 of row 0 overflow
  dense[2 * 520 + 519] = 2.0f;
  const TwellShape shape{3, 520, 256, 8};
  Buffer<uint64_t> words(shape.words());
  Buffer<float> spill(shape.max_spill_slots() * shape.tile);
  Buffer<int32_t> row_nnz(3);
  const TwellWide twell{shape, words.data(), spill.data(), shape.max_spill_slots(), row_nnz.data()};
  twell_pack_reference(ConstMatrixF(dense.data(), 3, 520), twell);
  const Pattern pattern = pattern_from_twell(twell);
  EXPECT_EQ(pattern.row(0).size(), 300u);
  EXPECT_EQ(pattern.row(1).size(), 0u);
  ASSERT_EQ(pattern.row(2).size(), 1u);
  EXPECT_EQ(pattern.row(2)[0], 519u);

  Context ctx(1);
  Arena::Scope scope(ctx.scratch());
  const Csr csr = csr_from_twell(ctx, scope, twell);
  EXPECT_EQ(csr.value[300], 2.0f);
  EXPECT_EQ(std::vector<uint32_t>(csr.column, csr.column + csr.nnz()), pattern.column);

  // Counts that are not those of the rows, too many or too few.
  row_nnz[2] = 2;
  EXPECT_THROW(csr_from_twell(ctx, scope, twell), Error);
  row_nnz[0] = 301;
  row_nnz[2] = 0;
  EXPECT_THROW(csr_from_twell(ctx, scope, twell), Error);
}

}  // namespace
}  // namespace twell
