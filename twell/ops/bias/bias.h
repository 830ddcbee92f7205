// SPDX-License-Identifier: Apache-2.0
// The bias of a linear layer. x, d_y [M, N] f32, bias, d_bias [N]; rows may be strided.
#pragma once

#include "twell/base/context.h"
#include "twell/base/matrix.h"

namespace twell {

// x += bias on every row.
void bias_forward(Context& ctx, const float* bias, MatrixF x);
// d_bias += sum of the rows of d_y. The order of additions does not depend on the threads.
void bias_backward(Context& ctx, ConstMatrixF d_y, float* d_bias);

}  // namespace twell
