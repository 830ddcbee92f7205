// SPDX-License-Identifier: Apache-2.0
// A read-only view of a weight matrix in the dtype of its file (f32, bf16 or f16), row-major. Ops
// widen the values to f32 where they use them, which is exact, and compute in f32. So a product
// gives the same bits for every dtype that holds the same values, as long as it adds in the same
// order.
//
// Or in signed bytes with a scale per output (format/byte_matrix.h): of a row where products are
// with rows (x W^T), of a column where they are sums of rows (h W, w_down). A scale multiplies its
// output's whole sum.
#pragma once

#include <cstddef>
#include <cstdint>

#include "twell/base/dtype.h"
#include "twell/base/matrix.h"

namespace twell {

// IEEE binary16 storage.
struct F16 {
  uint16_t bits = 0;
};

struct I8 {
  int8_t value = 0;
};

struct WeightMatrix {
  const std::byte* data = nullptr;  // aligned to the dtype's size
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;             // elements from one row to the next, at least cols
  const float* scales = nullptr;  // of the outputs, with signed bytes

  WeightMatrix() = default;
  WeightMatrix(const void* data_in, DType dtype_in, int64_t rows_in, int64_t cols_in)
      : data(static_cast<const std::byte*>(data_in)),
        dtype(dtype_in),
        rows(rows_in),
        cols(cols_in),
        stride(cols_in) {}
  // f32 matrices convert to views of themselves.
  WeightMatrix(ConstMatrixF matrix)
      : WeightMatrix(matrix.data, DType::kF32, matrix.rows, matrix.cols) {
    stride = matrix.stride;
  }
  WeightMatrix(MatrixF matrix) : WeightMatrix(ConstMatrixF(matrix)) {}

  bool empty() const { return data == nullptr; }
  int64_t value_bytes() const { return dtype == DType::kF32 ? 4 : dtype == DType::kI8 ? 1 : 2; }
  const std::byte* at(int64_t row, int64_t col = 0) const {
    return data + (row * stride + col) * value_bytes();
  }
  // Rows [begin, begin + count); not of signed bytes.
  WeightMatrix slice_rows(int64_t begin, int64_t count) const {
    WeightMatrix out = *this;
    out.data = at(begin);
    out.rows = count;
    return out;
  }
  // Only for a view of f32 values.
  ConstMatrixF f32() const { return {reinterpret_cast<const float*>(data), rows, cols, stride}; }
};

// out[i] = the i-th of `count` values of a dtype, without scales; Highway, dispatched at run time.
void widen(const std::byte* values, DType dtype, int64_t count, float* out);

// Calls use(const T*) with T = float, BF16, F16 or I8, the type of the values of a dtype.
template <typename Use>
auto with_weight_type(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::kBF16:
      return use(static_cast<const BF16*>(nullptr));
    case DType::kF16:
      return use(static_cast<const F16*>(nullptr));
    case DType::kI8:
      return use(static_cast<const I8*>(nullptr));
    default:
      return use(static_cast<const float*>(nullptr));
  }
}

}  // namespace twell
