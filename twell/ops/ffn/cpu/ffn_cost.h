// SPDX-License-Identifier: Apache-2.0
// Cost model of up and down on the CPU, from measured non-zeros. A model and not a stopwatch, so
// that the choice, and with it the result, repeats bit for bit.
#pragma once

#include <cstdint>

#include "twell/ops/ffn/ffn.h"

namespace twell {

// One chunk of tokens. Costs are in units of one (token, neuron) pair inside a large GEMM. Width
// and number of threads scale all costs alike and do not appear.
struct FfnWork {
  int64_t tokens = 0;      // M
  int64_t ffn = 0;         // F
  int64_t nnz = 0;         // active (token, neuron) pairs
  int64_t union_size = 0;  // weight rows that tile-union reads, tile_union_size()
};
double dense_cost(const FfnWork& work);
double row_fused_cost(const FfnWork& work);
double tile_union_cost(const FfnWork& work);

// Whether dense is the cheapest whatever the union turns out to be.
bool surely_dense(const FfnWork& work);
FfnExecution cheapest_execution(const FfnWork& work);
FfnExecution cheapest_sparse(const FfnWork& work);

}  // namespace twell
