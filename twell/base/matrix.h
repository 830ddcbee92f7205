// SPDX-License-Identifier: Apache-2.0
// Non-owning view of a row-major matrix: element (r, c) is data[r * stride + c].
#pragma once

#include <cstdint>
#include <type_traits>

namespace twell {

template <typename T>
struct Matrix {
  T* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;  // elements from one row to the next, at least cols

  Matrix() = default;
  Matrix(T* data_in, int64_t rows_in, int64_t cols_in)
      : Matrix(data_in, rows_in, cols_in, cols_in) {}
  Matrix(T* data_in, int64_t rows_in, int64_t cols_in, int64_t stride_in)
      : data(data_in), rows(rows_in), cols(cols_in), stride(stride_in) {}

  // Matrix<float> converts to Matrix<const float>.
  operator Matrix<const T>() const requires(!std::is_const_v<T>) {
    return {data, rows, cols, stride};
  }

  T* row(int64_t r) const { return data + r * stride; }
  T& operator()(int64_t r, int64_t c) const { return data[r * stride + c]; }
  // Rows [begin, begin + count).
  Matrix slice_rows(int64_t begin, int64_t count) const {
    return {data + begin * stride, count, cols, stride};
  }
  bool empty() const { return data == nullptr; }
};

using MatrixF = Matrix<float>;
using ConstMatrixF = Matrix<const float>;

}  // namespace twell
