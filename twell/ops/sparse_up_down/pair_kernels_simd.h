// SPDX-License-Identifier: Apache-2.0
// Inner loops over (token, neuron) pairs; Highway, dispatched at run time. In all of them the sum
// behind one output has a fixed order that does not depend on how pairs are grouped into calls.
// `prefetch` is a row [d] that will be read next, never null (any readable row will do).
#pragma once

#include <cstdint>

namespace twell {

// out[i] = scale[i] * <a, b[i]> for i < count.
struct ScaledDots {
  const float* a;         // [d]
  const float* const* b;  // [count] pointers to [d]
  const float* scale;     // [count]
  float* out;             // [count]
  int64_t count;
  int64_t d;
  const float* prefetch;
};
void scaled_dots(const ScaledDots& problem);

// y += sum over i < count of scale[i] * rows[i], added in the order of i.
struct SumRows {
  float* y;                  // [d]
  const float* const* rows;  // [count] pointers to [d]
  const float* scale;        // [count]
  int64_t count;
  int64_t d;
  const float* prefetch;
};
void add_scaled_rows(const SumRows& problem);

// y[i] += scale[i] * row for i < count.
struct SpreadRow {
  float* const* y;     // [count] pointers to [d], distinct
  const float* row;    // [d]
  const float* scale;  // [count]
  int64_t count;
  int64_t d;
  const float* prefetch;
};
void spread_scaled_row(const SpreadRow& problem);

}  // namespace twell
