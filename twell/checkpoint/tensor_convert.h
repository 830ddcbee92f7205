// SPDX-License-Identifier: Apache-2.0
// Values of stored tensors to f32 matrices and back, as they are or transposed.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>

#include "twell/base/dtype.h"
#include "twell/base/matrix.h"
#include "twell/checkpoint/safetensors.h"

namespace twell {

using ByteSink = std::function<void(std::span<const std::byte>)>;

// InputError unless the tensor is F32, F16 or BF16.
void require_float(const TensorInfo& info, const std::string& source);

// out [rows, cols], contiguous, from a tensor of as many values in the same order: `count` of its
// rows from `begin` on...
void read_rows(const TensorInfo& info, MatrixF out, int64_t begin, int64_t count);
// ...or stored as [cols, rows]: `count` of its columns, which are rows of the tensor.
void read_transposed(const TensorInfo& info, MatrixF out, int64_t begin, int64_t count);
// Whether two tensors hold the same values in the same order, whatever their types and shapes. A
// NaN equals a NaN of the same bits.
bool equal_values(const TensorInfo& a, const TensorInfo& b);

// Streams values [rows, cols], contiguous, in the given type, a piece at a time; the second as
// [cols, rows]. InputError on a finite value that F16 cannot hold.
void write_rows(ConstMatrixF values, DType dtype, const ByteSink& sink);
void write_transposed(ConstMatrixF values, DType dtype, const ByteSink& sink);
// The values of a stored tensor, in its order, in another type.
void write_converted(const TensorInfo& info, DType dtype, const ByteSink& sink);

}  // namespace twell
