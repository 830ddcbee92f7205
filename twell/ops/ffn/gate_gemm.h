// SPDX-License-Identifier: Apache-2.0
// Gate projection with TwELL output: out = TwELL(relu(x weight^T)).
//   x [M, D] f32, weight [F, D] f32 (w_gate, or w_up of a layer without a gate), out [M, F].
// relu(v) is v > 0 ? v : 0 here and in every dense execution: a NaN does not fire.
//
// On the CPU the GEMM writes the spill area itself, as the row-major matrix [M, tiles * T], so an
// overflowing tile is where it belongs already: slot of (row, t) = row * tiles + t, out.spill must
// have room for all of them, and callers with many tokens work in chunks. Afterwards the area holds
// relu'd values in spilled tiles and x weight^T as computed elsewhere: gate_dense() below is a
// valid gate for a dense execution, which then costs no second GEMM.
// Errors: Error when shapes disagree or the TwELL shape is unsupported.
#pragma once

#include <cstdint>

#include "twell/base/context.h"
#include "twell/base/matrix.h"
#include "twell/format/twell.h"

namespace twell {

struct GateGemm {
  ConstMatrixF x;       // [M, D]
  ConstMatrixF weight;  // [F, D]
  TwellWide out;        // [M, F], row_nnz set, spill_slots >= shape.max_spill_slots()
};

struct GateStats {
  int64_t nnz = 0;  // active (token, neuron) pairs
  int64_t max_row_nnz = 0;
};
GateStats gate_gemm(Context& ctx, const GateGemm& problem);

// Its two halves, for a caller that looks at the gate in between: the product alone, which is then
// gate_dense(out), and relu and packing. A gate that runs dense need not be packed.
void gate_product(Context& ctx, const GateGemm& problem);
GateStats gate_pack(Context& ctx, const TwellWide& out);

// [M, F], stride tiles * T: x weight^T of the last gate_gemm into `out`; its relu is the gate.
inline MatrixF gate_dense(const TwellWide& out) {
  return {out.spill, out.shape.rows, out.shape.cols, out.shape.tiles() * out.shape.tile};
}

// TwELL storage of one chunk of tokens, in scratch memory.
TwellWide alloc_twell_wide(Arena::Scope& scope, const TwellShape& shape);

}  // namespace twell
