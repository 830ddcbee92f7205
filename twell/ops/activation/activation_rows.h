// SPDX-License-Identifier: Apache-2.0
// Elementwise work of a dense feed-forward layer with the activation f, one token's row [F] per
// call; SIMD, chosen at run time.
//   gated      h = f(x) * u
//   non-gated  h = f(x), u is null
// Under dReLU max(u, 0) stands for u. f may be a blend with ReLU unless it leaves zeros. Values are
// within a few ulp of the definitions in format/activation.h.
#pragma once

#include <cstdint>

#include "twell/format/activation.h"

namespace twell {

struct ActivatedRow {
  // Active neurons: those with f(x) != 0; for a blend with ReLU those with x > 0; for those
  // that leave zeros where not x <= zero_up_to(), so that a NaN is active.
  int64_t nnz = 0;
  double l1 = 0.0;  // sum of |h|
};

// h [n] is written, and may be x or u. Where f leaves zeros it is 0 where the neuron is not
// active, whatever u is. fired [n], if not null, is set to 1 for each active neuron.
ActivatedRow activate_row(const BlendedActivation& f, const float* x, const float* u, float* h,
                          float* fired, int64_t n);

// With d = d_h + l1 * sign(h): h [n] is recomputed and written, d_u [n] = d * f(x) (gated), and d_h
// [n] becomes the gradient of x, d * u * f'(x), which is 0 where f'(x) is. Under dReLU d_u is 0
// where u <= 0. Where is_relu() x may be f(x).
struct ActivationBackwardRow {
  const float* x = nullptr;  // [n]
  const float* u = nullptr;  // [n], null when not gated
  float l1 = 0.0f;
  float* d_h = nullptr;  // [n] overwritten
  float* d_u = nullptr;  // [n] written, null when not gated
  float* h = nullptr;    // [n] written, or null
};
void activate_backward_row(const BlendedActivation& f, const ActivationBackwardRow& row, int64_t n);

}  // namespace twell
