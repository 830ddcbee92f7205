// SPDX-License-Identifier: Apache-2.0
// Inner loops over (token, neuron) pairs; Highway, dispatched at run time. Each output is summed in
// one fixed order, however pairs are grouped into calls and tiles: a dot product adds the sums of
// consecutive blocks of kColumnBlock elements, a sum of rows adds one row at a time. Rows of
// weights are f32, bf16, f16, or signed bytes without their scales. `prefetch` is a row [d] of the
// same dtype that will be read next; never null (any readable row will do).
#pragma once

#include <cstdint>

#include "twell/base/dtype.h"

namespace twell {

// One page of a row: long enough to stream, short enough for the rows of many tokens in a cache.
inline constexpr int64_t kColumnBlock = 1024;

// sums[i] += <a, b[i]> for i < count; one call for each block of columns, in their order.
struct AddDots {
  const float* a;        // [d]
  const void* const* b;  // [count] pointers to [d] of b_dtype
  DType b_dtype;
  float* sums;  // [count]
  int64_t count;
  int64_t d;  // at most kColumnBlock
  const void* prefetch;
};
void add_dots(const AddDots& problem);

// y += sum over i < count of scale[i] * rows[i], added in the order of i.
struct SumRows {
  float* y;                 // [d]
  const void* const* rows;  // [count] pointers to [d] of dtype
  DType dtype;
  const float* scale;  // [count]
  int64_t count;
  int64_t d;
  const void* prefetch;
};
void add_scaled_rows(const SumRows& problem);

// y[i] += scale[i] * row for i < count. The row is in the L1 cache already.
struct SpreadRow {
  float* const* y;     // [count] pointers to [d], distinct
  const float* row;    // [d]
  const float* scale;  // [count]
  int64_t count;
  int64_t d;
};
void spread_scaled_row(const SpreadRow& problem);

}  // namespace twell
