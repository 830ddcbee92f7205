// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/log_probs.h"

#include <algorithm>
#include <cmath>

#include "twell/base/error.h"

namespace twell {

TokenLogProbs token_log_probs(std::span<const float> logits, int32_t id, int64_t top,
                              int64_t vocab) {
  TWELL_CHECK(id >= 0 && id < std::ssize(logits), "token {} of {} logits", id, logits.size());
  const float max = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - max);
  const double log_sum = max + std::log(sum);
  const auto of = [&](int32_t token) {
    return TokenLogProb{
        token,
        static_cast<float>(static_cast<double>(logits[static_cast<size_t>(token)]) - log_sum)};
  };
  TokenLogProbs out{.token = of(id), .top = {}};
  if (top == 0) return out;
  std::vector<int32_t> ids(static_cast<size_t>(std::min(vocab, std::ssize(logits))));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
  const auto end = ids.begin() + std::min<int64_t>(top, std::ssize(ids));
  std::partial_sort(ids.begin(), end, ids.end(), [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  });
  for (auto it = ids.begin(); it != end; ++it) out.top.push_back(of(*it));
  return out;
}

}  // namespace twell
