// SPDX-License-Identifier: Apache-2.0
// Matrix product C = op(A) op(B) + beta * C, row-major: through oneDNN, and through kernels of our
// own for the few rows of a decoding step.
//   op(A) [M, K] f32, op(B) [K, N] f32, bf16, f16 or signed bytes, C [M, N] f32; strides are
//   honoured.
// B is widened to f32, which is exact: in registers for few rows, block by block for many. Few rows
// times signed bytes are products of integers (byte_products.h), for which A is rounded to 16 bits.
// The scales of signed bytes multiply the columns of C, with beta 0 alone.
// A linear layer with weight W [out, in] is y = x W^T: trans_b on W; its backward is
// dx = dy W and dW += dy^T x.
// Errors: Error when shapes disagree. Deterministic for a given shape and thread count.
#pragma once

#include "twell/base/context.h"
#include "twell/base/matrix.h"
#include "twell/format/weight_matrix.h"

namespace twell {

struct Matmul {
  ConstMatrixF a;
  WeightMatrix b;
  MatrixF c;
  bool trans_a = false;  // a is stored [K, M]
  bool trans_b = false;  // b is stored [N, K]
  float beta = 0.0f;     // 0: c is written without being read; 1: accumulated into
};

void matmul(Context& ctx, const Matmul& problem);

// y [M, out] = x [M, in] W^T, W [out, in].
void linear_forward(Context& ctx, ConstMatrixF x, const WeightMatrix& weight, MatrixF y);
// d_x = d_y W (d_x_beta 1 accumulates; an empty d_x is skipped) and d_weight += d_y^T x.
struct LinearBackward {
  ConstMatrixF x;       // [M, in]
  ConstMatrixF weight;  // [out, in]
  ConstMatrixF d_y;     // [M, out]
  MatrixF d_x = {};     // [M, in] or empty
  float d_x_beta = 0.0f;
  MatrixF d_weight;  // [out, in], accumulated
};
void linear_backward(Context& ctx, const LinearBackward& problem);

}  // namespace twell
