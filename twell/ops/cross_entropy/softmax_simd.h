// SPDX-License-Identifier: Apache-2.0
// Row kernels of the cross-entropy: SIMD, chosen at run time.
#pragma once

#include <cstdint>

namespace twell {

struct RowSoftmax {
  float max = 0.0f;
  double sum = 0.0;  // of exp(logit - max); loss = log(sum) + max - logits[target]
};

// Maximum and sum of exponentials of one row; the row [n] is overwritten with exp(logit - max).
RowSoftmax exp_row(float* row, int64_t n);

// row[i] *= scale
void scale_row(float* row, int64_t n, float scale);

}  // namespace twell
