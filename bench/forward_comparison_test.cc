// SPDX-License-Identifier: Apache-2.0
#include "bench/forward_comparison.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "twell/base/error.h"
#include "twell/infer/test_model.h"

namespace twell {
namespace {

constexpr int64_t kVocab = 61;

TEST(ForwardComparison, FindsNoDifferenceBeyondRounding) {
  Context ctx(2);
  const auto model = test_model(ctx, kVocab);
  const std::vector<int32_t> ids = random_ids(3 * 40, kVocab, 2);
  for (const FfnPolicy policy : {FfnPolicy::kRowFused, FfnPolicy::kTileUnion, FfnPolicy::kAuto}) {
    const ForwardComparison result = compare_forward(
        ctx, *model, ids, {.sequences = 3, .length = 40, .repeats = 1, .sparse = policy});
    EXPECT_EQ(result.tokens, 120);
    EXPECT_GT(result.max_abs_logit, 0.0);
    EXPECT_LT(result.max_abs_logit_diff, 512 * 1.2e-7 * std::max(result.max_abs_logit, 1.0));
    EXPECT_EQ(result.layers.size(), 2u);
    EXPECT_GT(result.dense_full.median, result.dense_body.median);
  }
}

TEST(ForwardComparison, NamesDamagedWeights) {
  Context ctx(1);
  const auto model = test_model(ctx, kVocab);
  for (float& value : model->flat.span()) value = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(compare_forward(ctx, *model, random_ids(8, kVocab, 2),
                               {.sequences = 1, .length = 8, .repeats = 1}),
               InputError);
}

}  // namespace
}  // namespace twell
