// SPDX-License-Identifier: Apache-2.0
// Vector kernels of the feed-forward layer in training on the CPU, one token's row per call. The
// instruction set is picked at run time.
#pragma once

#include <cstdint>

#include "twell/base/matrix.h"

namespace twell {

// --- Dense rows [F], n = F ---

struct RowActivity {
  int32_t nnz = 0;  // active neurons
  double l1 = 0.0;  // sum of |h|
};

// g = relu(gate); h = g * u. gate [F] is overwritten with g; h [F] is written.
// fired [F], when not null: set to 1 where a neuron is active, else left as it is.
RowActivity relu_gate_row(float* gate, const float* up, float* h, float* fired, int64_t n);
// h = relu(h) in place, for the non-gated layer.
RowActivity relu_row(float* h, float* fired, int64_t n);

// Gated backward of h = g * u with d_h' = d_h + l1 * sign(h):
//   h [F] = g * u, d_up [F] = d_h' * g, and d_h becomes d_gate = d_h' * u where g is active, else
//   0.
void gated_backward_row(const float* gate, const float* up, float l1, float* d_h, float* d_up,
                        float* h, int64_t n);
// Non-gated: d_h becomes d_h + l1 where h is active, else 0.
void relu_backward_row(const float* h, float l1, float* d_h, int64_t n);

// --- Sparse rows: a list of rows of a table against one row. The table is a slice of columns that
// --- stays in cache. It has few columns and the list many entries, so a kernel keeps a group of
// --- columns in registers while it walks the list.

// Entries of a gate row [n] that are not <= 0.
int64_t count_active(const float* gate, int64_t n);
// Their columns and values, ascending; index and value have room for exactly that many.
void compress_active(const float* gate, int64_t n, uint32_t* index, float* value);

// out[i] += <x, table[rows[i]]>, i < n; x [table.cols]
void gathered_dots(const float* x, ConstMatrixF table, const uint32_t* rows, int64_t n, float* out);
// out [table.cols] += sum over i < n of factor[i] * table[rows[i]]
void gathered_sum(const float* factor, ConstMatrixF table, const uint32_t* rows, int64_t n,
                  float* out);
// The same for two outputs of one list; each row of the table is read once.
void gathered_sum2(const float* factor_a, const float* factor_b, ConstMatrixF table,
                   const uint32_t* rows, int64_t n, float* out_a, float* out_b);

}  // namespace twell
