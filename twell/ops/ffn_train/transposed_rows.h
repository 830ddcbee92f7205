// SPDX-License-Identifier: Apache-2.0
// The compact rows by neuron: what the weight gradients read.
#pragma once

#include <cstdint>

#include "twell/base/buffer.h"
#include "twell/base/context.h"
#include "twell/ops/ffn_train/ffn_train.h"

namespace twell {

// A run of tokens [first, first + count) and the gradient of h on its compact entries.
struct CompactSpan {
  const FfnSaved& saved;
  int64_t first;
  int64_t count;
  ConstMatrixF d_h;  // [count, W], L1 included
};

// Neuron j's entries are offset[j] .. offset[j + 1] - 1, in ascending tokens.
struct TransposedRows {
  int64_t* offset = nullptr;  // [F + 1]
  uint32_t* token = nullptr;  // [nnz] from the first of the span
  float* d_gate = nullptr;    // [nnz], gated only
  float* d_up = nullptr;      // [nnz] not gated: the gradient in front of the ReLU
  float* h = nullptr;         // [nnz]
};
TransposedRows transpose_rows(Context& ctx, Arena::Scope& scope, const CompactSpan& span);

}  // namespace twell
