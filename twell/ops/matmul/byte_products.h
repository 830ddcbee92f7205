// SPDX-License-Identifier: Apache-2.0
// Products of a few rows of activations with weights in signed bytes, as in decoding: in integers,
// because widening bytes to f32 takes longer than reading them. Internal to matmul.
//   q(m, k) = a(m, k) * factor(m), rounded to nearest even
//   c(m, n) = f32(sum over k of q(m, k) b(k, n)) / factor(m)
// The factor makes the row's largest value 32767, or what lets 128 times the sum of |q| fit into 31
// bits. So sums in 32 bits are exact in any order: every instruction set, number of threads and
// number of rows gives the same bits. A product is off by at most sum |b| / (2 factor) and two
// roundings to f32. Scales of B are left to the caller.
//
// A row with a value that is not finite gives NaN; values far below 1e-30 count as zeros.
#pragma once

#include <cstdint>

#include "twell/base/context.h"
#include "twell/base/matrix.h"
#include "twell/format/weight_matrix.h"

namespace twell {

// Products of longer rows might not fit into 32 bits.
inline constexpr int64_t kMostByteDepth = int64_t{1} << 22;

// Writes q [k] and returns 1 / factor, or NaN; k is at most kMostByteDepth.
float quantise_activations(const float* a, int64_t k, int16_t* q);

// C = A B^T with B [N, K] of signed bytes; a [M, K], c [M, N] written.
void byte_row_products(Context& ctx, ConstMatrixF a, const WeightMatrix& b, MatrixF c);

// C = A B with B [K, N] of signed bytes; a [M, K], c [M, N] written.
void byte_row_sums(Context& ctx, ConstMatrixF a, const WeightMatrix& b, MatrixF c);

}  // namespace twell
