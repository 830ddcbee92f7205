// SPDX-License-Identifier: Apache-2.0
// Gate projection with TwELL output, on the CPU: out = TwELL(relu(x weight^T)), or with the FATReLU
// of a threshold in place of ReLU.
//   x [M, D] f32, weight [F, D] f32, bf16 or f16 (w_gate, or w_up of a layer without a gate),
//   out [M, F].
// relu(v) is v <= threshold ? 0 : v here and in every other execution, so a NaN counts as active.
//
// The GEMM writes the spill area itself, as the row-major matrix [M, tiles * T], so an overflowing
// tile is already in its place: the slot of (row, t) is row * tiles + t. out.spill must have room
// for all slots, so callers with many tokens work in chunks. Afterwards the area holds ReLU'd
// values in spilled tiles and x weight^T elsewhere: gate_dense() is a valid gate for a dense
// execution, which then needs no second GEMM.
// Errors: Error when shapes disagree or the TwELL shape is unsupported.
#pragma once

#include <cstdint>

#include "twell/base/context.h"
#include "twell/base/matrix.h"
#include "twell/format/twell.h"
#include "twell/format/weight_matrix.h"

namespace twell {

struct GateGemm {
  ConstMatrixF x;       // [M, D]
  WeightMatrix weight;  // [F, D]
  TwellWide out;        // [M, F], row_nnz set, spill_slots >= shape.max_spill_slots()
  float threshold = 0.0f;
};

// Returns the number of active (token, neuron) pairs.
int64_t gate_gemm(Context& ctx, const GateGemm& problem);

// The two halves, for a caller that looks at the gate in between: gate_product computes
// gate_dense(out), gate_pack applies ReLU and packs. A gate that runs dense need not be packed.
void gate_product(Context& ctx, const GateGemm& problem);
int64_t gate_pack(Context& ctx, const TwellWide& out, float threshold = 0.0f);

// [M, F], stride tiles * T: x weight^T of the last gate_gemm into `out`; its relu is the gate.
inline MatrixF gate_dense(const TwellWide& out) {
  return {out.spill, out.shape.rows, out.shape.cols, out.shape.tiles() * out.shape.tile};
}

// TwELL storage of one chunk of tokens, in scratch memory.
TwellWide alloc_twell_wide(Arena::Scope& scope, const TwellShape& shape);

}  // namespace twell
