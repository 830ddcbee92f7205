// SPDX-License-Identifier: Apache-2.0
// Converts stored tensors to f32 matrices and back, optionally transposed, and checks that values
// are finite.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>

#include "twell/base/dtype.h"
#include "twell/base/matrix.h"
#include "twell/checkpoint/safetensors.h"
#include "twell/format/byte_matrix.h"

namespace twell {

using ByteSink = std::function<void(std::span<const std::byte>)>;

DType float_dtype(const std::string& name);  // of "F32", "F16" or "BF16"

std::string show_shape(std::span<const int64_t> shape);  // "[4096, 256]"

// InputError unless the tensor is F32, F16 or BF16.
void require_float(const TensorInfo& info, const std::string& source);

// Index of the first infinite or NaN value among packed values of a float dtype; -1: none.
int64_t first_non_finite(std::span<const std::byte> values, const std::string& dtype);
// Throws InputError with the tensor's name, the index in stored order, and the value.
[[noreturn]] void refuse_non_finite(const TensorInfo& info, int64_t index,
                                    const std::string& source);

// What to do with a tensor's values: they go to `out`, stay where they are in the file, or neither.
struct TensorPlace {
  void* out = nullptr;         // [rows, cols] row-major, as many values as the tensor has
  DType dtype = DType::kF32;   // of out: f32, or the tensor's own
  int64_t rows = 0, cols = 0;  // of out
  bool transposed = false;     // whether the tensor stores [cols, rows]
  bool stays = false;
};
// Reads the stored rows [begin, begin + count) to place.out, where they are columns if transposed.
void read_tensor(const TensorInfo& info, const TensorPlace& place, int64_t begin, int64_t count);
// Whether two tensors hold the same values in the same order; dtypes and shapes may differ. NaNs
// are equal if their bits are.
bool equal_values(const TensorInfo& a, const TensorInfo& b);

// Streams values [rows, cols], contiguous, in the given dtype, in pieces; write_transposed streams
// them as [cols, rows]. InputError on a finite value that F16 cannot represent.
void write_rows(ConstMatrixF values, DType dtype, const ByteSink& sink);
void write_transposed(ConstMatrixF values, DType dtype, const ByteSink& sink);
// Streams the values of a stored tensor, in its order, in another dtype.
void write_converted(const TensorInfo& info, DType dtype, const ByteSink& sink);
// Streams the values of a stored matrix, rounded to bf16 first, in 8 bits, or the scales of its
// rows in f32 (format/byte_matrix.h).
void write_bytes(const TensorInfo& info, ByteType type, const ByteSink& sink);
void write_byte_scales(const TensorInfo& info, ByteType type, const ByteSink& sink);

}  // namespace twell
