// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/log_probs.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "twell/base/error.h"

namespace twell {
namespace {

TEST(LogProbs, TheMostLikelyComeFirstAndEqualsById) {
  const std::vector<float> logits = {1.0f, 3.0f, 2.0f, 3.0f, 3.0f, 9.0f};
  const double log_sum =
      std::log(std::exp(1.0) + 3 * std::exp(3.0) + std::exp(2.0) + std::exp(9.0));
  // The last logit is padding of the output head: it has a probability and is never listed.
  const TokenLogProbs got = token_log_probs(logits, 2, 4, 5);
  EXPECT_EQ(got.token.id, 2);
  EXPECT_NEAR(got.token.log_prob, 2.0 - log_sum, 1e-6);
  ASSERT_EQ(got.top.size(), 4u);
  const std::vector<int32_t> ids = {1, 3, 4, 2};
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(got.top[i].id, ids[i]);
    EXPECT_NEAR(got.top[i].log_prob, logits[static_cast<size_t>(ids[i])] - log_sum, 1e-6);
  }
  EXPECT_EQ(token_log_probs(logits, 2, 9, 5).top.size(), 5u);
  EXPECT_THROW(token_log_probs(logits, 6, 0, 5), Error);
}

}  // namespace
}  // namespace twell
