// SPDX-License-Identifier: Apache-2.0
// Vector kernels of sparse rows of the feed-forward layer in training on the CPU: a list of rows of
// a table against one row. The table is a slice of columns that stays in cache. It has few columns
// and the list many entries, so a kernel keeps a group of columns in registers while it walks the
// list. The instruction set is picked at run time.
#pragma once

#include <cstdint>

#include "twell/base/matrix.h"

namespace twell {

// Entries of a gate row [n] that are not <= threshold.
int64_t count_active(const float* gate, float threshold, int64_t n);
// Their columns and values, ascending; index and value have room for exactly that many.
void compress_active(const float* gate, float threshold, int64_t n, uint32_t* index, float* value);

// out[i] += <x, table[rows[i]]>, i < n; x [table.cols]
void gathered_dots(const float* x, ConstMatrixF table, const uint32_t* rows, int64_t n, float* out);
// out [table.cols] += sum over i < n of factor[i] * table[rows[i]]
void gathered_sum(const float* factor, ConstMatrixF table, const uint32_t* rows, int64_t n,
                  float* out);
// The same for two outputs of one list; each row of the table is read once.
void gathered_sum2(const float* factor_a, const float* factor_b, ConstMatrixF table,
                   const uint32_t* rows, int64_t n, float* out_a, float* out_b);

}  // namespace twell
