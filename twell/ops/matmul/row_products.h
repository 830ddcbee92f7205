// SPDX-License-Identifier: Apache-2.0
// Products of a few rows of A, as in decoding: bound by reading B once, in the dtype that it has
// (f32, bf16 or f16; signed bytes: byte_products.h). Internal to matmul.
#pragma once

#include "twell/base/context.h"
#include "twell/base/matrix.h"
#include "twell/format/weight_matrix.h"

namespace twell {

// C = A B^T + beta * C: dot products of rows. a [M, K], b [N, K], c [M, N].
void row_products(Context& ctx, ConstMatrixF a, const WeightMatrix& b, MatrixF c, float beta);

// C = A B + beta * C: sums of the rows of B, added in their order. a [M, K], b [K, N], c [M, N].
void row_sums(Context& ctx, ConstMatrixF a, const WeightMatrix& b, MatrixF c, float beta);

}  // namespace twell
