// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/activity.h"

#include <algorithm>
#include <cmath>

namespace twell {

double union_growth(const LayerActivity& measured, int64_t ffn) {
  const double one = measured.nnz_per_token / static_cast<double>(ffn), any = measured.union_share;
  const double tokens = 128.0 / (1.0 + measured.extra_tiles);  // of a union, in the mean
  if (one <= 0.0 || any <= one || any >= 1.0 || tokens < 2.0) return 1.0;
  return std::clamp(std::log(std::log1p(-any) / std::log1p(-one)) / std::log(tokens), 0.0, 1.0);
}

}  // namespace twell
