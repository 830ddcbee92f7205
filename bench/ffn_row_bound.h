// SPDX-License-Identifier: Apache-2.0
// How far a row of a feed-forward layer in bf16 may be from its exact value, from the row's data.
//
//   g = relu(n Wg^T), u = n Wu^T, h = g u (without a gate: h = relu(n Wu^T)), y = h Wd [+ y0]
//
// In: x and the weights in bf16, row-major, a neuron per row. Out: y without any rounding; per
// element a bound that every execution keeps which multiplies bf16 exactly, adds in f32 in any
// order, and may round n, g, u, h, h Wd and y to bf16, each once; and how far a row is from y on
// average, if errors of roundings are independent of each other.
//
// Derivation. Rounding to bf16 (8 significant bits) errs by at most 2^-8 of the value. An addition
// in f32, truncated as tensor cores may, errs by at most 2^-23 of the sum, so that K of them,
// whatever their order, err by at most (K + 16) 2^-23 of the sum of absolute values; 16 covers the
// addends that a tensor core aligns at once. The errors of factors go through products in full:
// |g'u' - g u| <= g du + |u| dg + dg du. relu changes no difference for the worse, and a neuron
// whose product is below minus its error is zero in every execution. For the average, errors of
// roundings are uniform between -2^-8 and 2^-8 of the value, and those of sums in f32 are left out.
#pragma once

#include <cstdint>
#include <vector>

#include "twell/base/dtype.h"

namespace twell {

struct FfnRow {
  int64_t width = 0, ffn = 0;
  const BF16* x = nullptr;         // [D]
  const BF16* norm = nullptr;      // [D] weight of the RMSNorm in front; null: none
  float eps = 1e-5f;               // of the norm
  const BF16* w_gate = nullptr;    // [F, D]; null: without a gate
  const BF16* w_up = nullptr;      // [F, D]
  const BF16* w_down = nullptr;    // [F, D]
  const BF16* residual = nullptr;  // [D] y0; null: none
};

struct FfnRowBound {
  std::vector<double> y, error;               // [D]
  double deviation = 0.0;                     // root of the mean of |values - y|^2
  int64_t least_active = 0, most_active = 0;  // neurons above 0 in every, in some execution
  // The largest |values - y| / error of the row: at most 1 for every execution. NaN stays NaN.
  double worst(const BF16* values) const;
  // |values - y| / deviation. A neuron's errors are at most 4 deviations, and those of many neurons
  // are normally distributed, so that 6 is unlikely in any number of rows.
  double distance(const BF16* values) const;
};

FfnRowBound ffn_row_bound(const FfnRow& row);

}  // namespace twell
