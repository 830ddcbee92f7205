// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/embedding/embedding.h"

#include <gtest/gtest.h>

#include "twell/base/error.h"
#include "twell/base/test_matrix.h"

namespace twell {
namespace {

std::vector<int32_t> random_ids(int64_t count, int64_t vocab) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<int32_t>(uniform_below(42, 9, i, static_cast<uint64_t>(vocab)));
  }
  return ids;
}

TEST(Embedding, ForwardCopiesRows) {
  for (const int64_t tokens : {0, 1, 127, 300}) {
    for (const int64_t width : {1, 17, 72}) {
      const auto ids = random_ids(tokens, 11);
      const auto table = TestMatrix::random(11, width, 1, 3);
      TestMatrix out(tokens, width, 2);
      Context ctx(2);
      const float scale = tokens == 127 ? 4.0f : 1.0f;
      embedding_forward(ctx, ids, table.view(), out.view(), scale);
      for (int64_t m = 0; m < tokens; ++m) {
        for (int64_t i = 0; i < width; ++i) {
          ASSERT_EQ(out(m, i), scale * table(ids[static_cast<size_t>(m)], i));
        }
      }
      EXPECT_TRUE(out.gaps_untouched());
    }
  }
}

TEST(Embedding, BackwardAddsInTokenOrderForAnyThreadCount) {
  for (const int64_t tokens : {0, 1, 127, 1000}) {
    for (const int64_t width : {1, 17, 200}) {
      const auto ids = random_ids(tokens, 7);
      const auto d_out = TestMatrix::random(tokens, width, 2, 1);
      const auto before = TestMatrix::random(7, width, 3, 5);
      const float scale = tokens == 127 ? 4.0f : 1.0f;
      TestMatrix expected = before;
      for (int64_t m = 0; m < tokens; ++m) {
        for (int64_t i = 0; i < width; ++i) {
          expected(ids[static_cast<size_t>(m)], i) += scale * d_out(m, i);
        }
      }
      for (const int threads : {1, 2, 3}) {
        Context ctx(threads);
        TestMatrix d_table = before;
        embedding_backward(ctx, ids, d_out.view(), d_table.view(), scale);
        EXPECT_TRUE(d_table.same_bits(expected)) << tokens << " x " << width << ", " << threads;
      }
    }
  }
}

TEST(Embedding, RefusesBadIdsAndShapes) {
  Context ctx(1);
  const auto table = TestMatrix::random(4, 8, 1);
  TestMatrix out(2, 8), narrow(2, 7), d_table(4, 8);
  for (const int32_t bad : {-1, 4}) {
    const std::vector<int32_t> ids = {0, bad};
    EXPECT_THROW(embedding_forward(ctx, ids, table.view(), out.view()), Error);
    EXPECT_THROW(embedding_backward(ctx, ids, out.view(), d_table.view()), Error);
  }
  const std::vector<int32_t> ids = {0, 1}, longer = {0, 1, 2};
  EXPECT_THROW(embedding_forward(ctx, ids, table.view(), narrow.view()), Error);
  EXPECT_THROW(embedding_forward(ctx, longer, table.view(), out.view()), Error);
}

}  // namespace
}  // namespace twell
