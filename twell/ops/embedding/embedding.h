// SPDX-License-Identifier: Apache-2.0
// Token embedding: out[m] = scale * table[ids[m]].
//   ids [M] int32 in [0, V), table [V, D] f32, bf16 or f16, out [M, D] f32.
// Errors: Error on an id outside [0, V). Backward is deterministic for any thread count.
#pragma once

#include <cstdint>
#include <span>

#include "twell/base/context.h"
#include "twell/base/matrix.h"
#include "twell/format/weight_matrix.h"

namespace twell {

void embedding_forward(Context& ctx, std::span<const int32_t> ids, const WeightMatrix& table,
                       MatrixF out, float scale = 1.0f);
// d_table[ids[m]] += scale * d_out[m]
void embedding_backward(Context& ctx, std::span<const int32_t> ids, ConstMatrixF d_out,
                        MatrixF d_table, float scale = 1.0f);

}  // namespace twell
