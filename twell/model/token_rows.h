// SPDX-License-Identifier: Apache-2.0
// An order of tokens for feed-forward layers that compute the union of the neurons of 128 tokens at
// a time. Internal to model.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace twell {

// The row of each token [M] where tokens of the same id follow each other, in the order of the
// text. They activate similar neurons, so that 128 rows have a smaller union than 128 tokens of the
// text (bench/results/2026-11-26-token-order.txt). Ids are less than vocab; those below 0, of
// tokens that are not known yet, count as 0.
// A radix sort, because counts of each id would cost more than prompts of a few hundred tokens.
inline void rows_by_id(std::span<const int32_t> ids, int64_t vocab, std::span<int32_t> rows) {
  constexpr int kDigitBits = 9;
  constexpr int32_t kDigits = 1 << kDigitBits;
  std::vector<int32_t> tokens(ids.size()), sorted(ids.size());
  std::iota(tokens.begin(), tokens.end(), 0);
  for (int shift = 0; (vocab - 1) >> shift > 0; shift += kDigitBits) {
    const auto digit = [&](int32_t token) {
      const int32_t id = std::max(ids[static_cast<size_t>(token)], 0);
      return static_cast<size_t>(id >> shift & (kDigits - 1));
    };
    std::array<int32_t, kDigits + 1> next{};  // place of the next token with a digit
    for (const int32_t token : tokens) ++next[digit(token) + 1];
    std::partial_sum(next.begin(), next.end(), next.begin());
    for (const int32_t token : tokens) sorted[static_cast<size_t>(next[digit(token)]++)] = token;
    tokens.swap(sorted);
  }
  for (size_t row = 0; row < tokens.size(); ++row) {
    rows[static_cast<size_t>(tokens[row])] = static_cast<int32_t>(row);
  }
}

}  // namespace twell
