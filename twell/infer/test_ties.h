// SPDX-License-Identifier: Apache-2.0
// Test code: compares greedy texts of one model that were computed in different orders. They may
// differ first only where two tokens are almost equally likely.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "twell/infer/session.h"

namespace twell {

// relative: two logits count as equal when their difference is at most this share of the larger
// one.
inline void expect_same_but_for_ties(Session& judge, std::span<const int32_t> prompt,
                                     const std::vector<int32_t>& got,
                                     const std::vector<int32_t>& want, float relative = 0.05f) {
  size_t same = 0;
  while (same < got.size() && same < want.size() && got[same] == want[same]) ++same;
  if (same == got.size() && same == want.size()) return;
  // One text may have ended with an end-of-text token, which its ids do not include.
  std::vector<int32_t> ids(prompt.begin(), prompt.end());
  ids.insert(ids.end(), want.begin(), want.begin() + static_cast<ptrdiff_t>(same));
  judge.clear(0);
  const std::span<const float> logits = judge.append(0, ids);
  std::vector<float> top(logits.begin(), logits.end());
  std::partial_sort(top.begin(), top.begin() + 2, top.end(), std::greater<>());
  EXPECT_LE(top[0] - top[1], relative * std::abs(top[0]))
      << "they part at token " << same << " of " << got.size() << " and " << want.size();
}

}  // namespace twell
