// SPDX-License-Identifier: Apache-2.0
// Kernels of the hybrid execution: a short list of rows of a table [*, D] against one row [D].
// SIMD, picked at run time. Lists are in a fixed order, and so are the additions.
#pragma once

#include <cstdint>

#include "twell/base/matrix.h"

namespace twell {

// Entries of a gate row [n] that are not <= 0.
int64_t count_active(const float* gate, int64_t n);
// Their columns and values, ascending; index and value have room for exactly that many.
void compress_active(const float* gate, int64_t n, uint32_t* index, float* value);

// out[i] = <x, table[rows[i]]>, i < n
void gathered_dots(const float* x, ConstMatrixF table, const uint32_t* rows, int64_t n, float* out);
// out [D] += sum over i < n of factor[i] * table[rows[i]]
void gathered_sum(const float* factor, ConstMatrixF table, const uint32_t* rows, int64_t n,
                  float* out);
// The same for two outputs of one list: each row of the table is read once.
void gathered_sum2(const float* factor_a, const float* factor_b, ConstMatrixF table,
                   const uint32_t* rows, int64_t n, float* out_a, float* out_b);

}  // namespace twell
