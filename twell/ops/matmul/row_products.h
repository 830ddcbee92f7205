// SPDX-License-Identifier: Apache-2.0
// C = A B^T + beta * C for a few rows of A, as in decoding: dot products of rows, bound by reading
// B once. Internal to matmul.
#pragma once

#include "twell/ops/matmul/matmul.h"

namespace twell {

// a [M, K], b [N, K], c [M, N].
void row_products(Context& ctx, ConstMatrixF a, ConstMatrixF b, MatrixF c, float beta);

}  // namespace twell
