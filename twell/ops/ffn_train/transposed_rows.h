// SPDX-License-Identifier: Apache-2.0
// The compact rows by neuron: what the weight gradients read.
#pragma once

#include <cstdint>

#include "twell/base/buffer.h"
#include "twell/base/context.h"
#include "twell/ops/ffn_train/ffn_train.h"

namespace twell {

// A span of tokens is cut into blocks; within a block the entries are sorted by neuron, then by
// token. Neuron j's entries of block b are begin(b, j) .. begin(b, j + 1) - 1 of the arrays.
struct TransposedRows {
  int64_t ffn = 0;
  int64_t blocks = 0;
  int64_t* offset = nullptr;  // [blocks, F + 1]
  uint32_t* token = nullptr;  // [nnz]
  float* d_gate = nullptr;    // [nnz], gated only
  float* d_up = nullptr;      // [nnz] not gated: the gradient in front of the ReLU
  float* h = nullptr;         // [nnz]

  int64_t begin(int64_t block, int64_t neuron) const { return offset[block * (ffn + 1) + neuron]; }
};

// A run of tokens [first, first + count) and the gradient of h on its compact entries.
struct CompactSpan {
  const FfnSaved& saved;
  int64_t first;
  int64_t count;
  ConstMatrixF d_h;  // [count, W]

  int64_t nnz() const;
};
TransposedRows transpose_rows(Context& ctx, Arena::Scope& scope, const CompactSpan& span,
                              int64_t tokens_per_block);

// Cumulative entries per neuron, over all blocks [F + 1].
const int64_t* neuron_work(Arena::Scope& scope, const TransposedRows& rows);

}  // namespace twell
