// SPDX-License-Identifier: Apache-2.0
// The compact rows by neuron: what the weight gradients read.
#pragma once

#include <cstdint>

#include "twell/base/buffer.h"
#include "twell/base/context.h"
#include "twell/format/hybrid.h"

namespace twell {

// A run of tokens [first, first + count) and, on their compact entries, what the weight gradients
// are made of.
struct CompactSpan {
  int64_t first;
  int64_t count;
  MatrixF d_gate;  // [count, W], gated only
  MatrixF d_up;    // [count, W]; not gated: the gradient in front of the ReLU
  MatrixF h;       // [count, W]
};

// Neuron j's entries are offset[j] .. offset[j + 1] - 1, in ascending tokens.
struct TransposedRows {
  int64_t* offset = nullptr;  // [F + 1]
  uint32_t* token = nullptr;  // [nnz] from the first of the span
  float* d_gate = nullptr;    // [nnz], gated only
  float* d_up = nullptr;      // [nnz]
  float* h = nullptr;         // [nnz]
};
TransposedRows transpose_rows(Context& ctx, Arena::Scope& scope, const HybridF32& hybrid,
                              const CompactSpan& span);

}  // namespace twell
