// SPDX-License-Identifier: Apache-2.0
// Elementwise work of a dense feed-forward layer whose activation f is not ReLU, one token's row
// [F] per call; SIMD, chosen at run time. ReLU layers have kernels of their own, which skip zeros.
//   gated      h = f(x) * u
//   non-gated  h = f(x), u is null
// f may be a blend with ReLU, except for relu2. Values are within a few ulp of the definitions in
// format/activation.h.
#pragma once

#include <cstdint>

#include "twell/format/activation.h"

namespace twell {

struct ActivatedRow {
  // Neurons with f(x) != 0; for a blend with ReLU and for relu2 those with x > 0 (relu2: or NaN).
  int64_t nnz = 0;
  double l1 = 0.0;  // sum of |h|
};

// h [n] is written, and may be x or u. fired [n], if not null, is set to 1 for each counted neuron.
ActivatedRow activate_row(const BlendedActivation& f, const float* x, const float* u, float* h,
                          float* fired, int64_t n);

// With d = d_h + l1 * sign(h): h [n] is recomputed and written, d_u [n] = d * f(x) (gated), and d_h
// [n] becomes the gradient of x, d * u * f'(x).
struct ActivationBackwardRow {
  const float* x = nullptr;  // [n]
  const float* u = nullptr;  // [n], null when not gated
  float l1 = 0.0f;
  float* d_h = nullptr;  // [n] overwritten
  float* d_u = nullptr;  // [n] written, null when not gated
  float* h = nullptr;    // [n] written
};
void activate_backward_row(const BlendedActivation& f, const ActivationBackwardRow& row, int64_t n);

}  // namespace twell
