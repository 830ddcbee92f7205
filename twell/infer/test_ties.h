// SPDX-License-Identifier: Apache-2.0
// Test code: compares greedy texts of one model that were computed in different orders. They may
// part only where two tokens are almost equally likely, and each must stay almost as likely as the
// best to its end.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "twell/infer/session.h"

namespace twell {

// relative: two logits count as equal when their difference is at most this share of the largest
// one. only: the tokens that the texts consist of; empty: any.
inline void expect_same_but_for_ties(Session& judge, std::span<const int32_t> prompt,
                                     const std::vector<int32_t>& got,
                                     const std::vector<int32_t>& want, float relative = 0.05f,
                                     const std::vector<int32_t>& only = {}) {
  if (got == want) return;
  judge.clear(0);
  std::vector<float> logits;
  float tolerance = 0.0f;
  const auto take = [&](std::span<const float> all) {
    tolerance = relative * std::abs(*std::ranges::max_element(all));
    logits.assign(all.begin(), all.end());
    if (only.empty()) return;
    std::ranges::fill(logits, -std::numeric_limits<float>::infinity());
    for (const int32_t id : only) logits[static_cast<size_t>(id)] = all[static_cast<size_t>(id)];
  };
  take(judge.append(0, prompt));
  for (size_t i = 0; i < got.size(); ++i) {
    const float top = *std::ranges::max_element(logits);
    ASSERT_LE(top - logits[static_cast<size_t>(got[i])], tolerance)
        << "token " << i << " of " << got.size() << " is " << got[i];
    if (judge.length(0) == judge.capacity()) return;
    take(judge.append(0, std::span(got).subspan(i, 1)));
  }
  // A text that ends before the other one does has drawn an end-of-text token, which its ids do not
  // include, and with which the other one almost went on.
  const bool begins_same = std::equal(
      got.begin(), got.begin() + static_cast<ptrdiff_t>(std::min(got.size(), want.size())),
      want.begin());
  if (!begins_same || got.size() > want.size()) return;
  std::vector<float> top(logits.begin(), logits.end());
  std::partial_sort(top.begin(), top.begin() + 2, top.end(), std::greater<>());
  EXPECT_LE(top[0] - top[1], tolerance) << "it ends after " << got.size();
}

}  // namespace twell
