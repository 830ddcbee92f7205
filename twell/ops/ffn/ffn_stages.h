// SPDX-License-Identifier: Apache-2.0
// The dense execution behind the gate GEMM, for one chunk of tokens.
#pragma once

#include <cstdint>

#include "twell/base/context.h"
#include "twell/base/matrix.h"
#include "twell/format/ffn_weights.h"
#include "twell/ops/ffn/gate_gemm.h"
#include "twell/ops/ffn/sparse_up_down.h"

namespace twell {

// y = FFN, given gate = x firing()^T [M, F] before its activation, with its bias. Without an up
// projection the gate is overwritten. row_nnz [M] receives the active neurons of each token.
void dense_up_down(Context& ctx, const StoredFfnWeights& weights, ConstMatrixF x, MatrixF gate,
                   MatrixF y, int32_t* row_nnz);

}  // namespace twell
