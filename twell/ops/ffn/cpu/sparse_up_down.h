// SPDX-License-Identifier: Apache-2.0
// Up and down on the active neurons of packed gates, on the CPU, with weights of any dtype of
// format/weight_matrix.h:
//   gated:      y[m] = sum over active n of  g[m, n] * <x[m], w_up[n]> * w_down[n]
//   non-gated:  y[m] = sum over active n of  g[m, n] * w_down[n]
// with g[m, n]^2 instead of g[m, n] if `squared`, and the ReLU of the dot product if `up_relu`, in
// two orders:
//   row-fused   token by token; each active neuron's weight rows are read for each token
//   tile-union  per tile of tokens; each weight row of the union of the tile's active neurons is
//               read once and applied to the tokens it is active on
// Every dot product and every y[m] is summed in ascending order of neurons, so both give the same
// bits for any number of threads and any split of the tokens.
// Errors: Error when shapes disagree.
#pragma once

#include <cstdint>

#include "twell/base/context.h"
#include "twell/base/matrix.h"
#include "twell/format/csr.h"
#include "twell/format/twell.h"
#include "twell/format/weight_matrix.h"

namespace twell {

struct SparseUpDown {
  TwellWide gate;       // [M, F] g, the ReLU of the gate or of x w_up^T; ascending columns, row_nnz
  ConstMatrixF x;       // [M, D]; not read without a gate
  WeightMatrix w_up;    // [F, D], or empty: no gate
  WeightMatrix w_down;  // [F, D]
  MatrixF y;            // [M, D], written; overlaps nothing
  bool squared = false;  // the activation is relu2
  bool up_relu = false;  // the activation is dReLU
};

void row_fused_up_down(Context& ctx, const SparseUpDown& problem);
void tile_union_up_down(Context& ctx, const SparseUpDown& problem);

// Tokens per tile of tile_union_up_down: a thread's share, limited so that a block of their columns
// fits into a core's L2 cache.
int64_t tile_union_tokens(Context& ctx, int64_t tokens, int64_t width);

// The weight rows that tile-union reads: active neurons per tile of tile_union_tokens() consecutive
// tokens, summed over tiles. Threads may cut the tiles slightly differently.
int64_t tile_union_size(Context& ctx, const TwellWide& gate, int64_t width);

}  // namespace twell
