// SPDX-License-Identifier: Apache-2.0
// An order of tokens for feed-forward layers that compute the union of the neurons of 128 tokens at
// a time. Internal to model.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace twell {

// The row of each token [M] where tokens of the same id follow each other, in the order of the
// text. They activate similar neurons, so that 128 rows have a smaller union than 128 tokens of the
// text (bench/results/2026-11-26-token-order.txt). Ids are less than vocab; those below 0, of
// tokens that are not known yet, count as 0.
inline void rows_by_id(std::span<const int32_t> ids, int64_t vocab, std::span<int32_t> rows) {
  std::vector<int32_t> next(static_cast<size_t>(vocab) + 1);  // row of the next token of an id
  for (const int32_t id : ids) ++next[static_cast<size_t>(std::max(id, 0)) + 1];
  std::partial_sum(next.begin(), next.end(), next.begin());
  for (size_t token = 0; token < ids.size(); ++token) {
    rows[token] = next[static_cast<size_t>(std::max(ids[token], 0))]++;
  }
}

}  // namespace twell
