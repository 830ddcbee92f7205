// SPDX-License-Identifier: Apache-2.0
#include "twell/format/ell.h"

#include <algorithm>
#include <vector>

#include "twell/base/error.h"

namespace twell {
namespace {

void pack_row(const float* dense, int64_t row, Ell& out) {
  int64_t nnz = 0;
  for (int64_t col = 0; col < out.cols; ++col) {
    if (dense[col] == 0.0f) continue;
    if (nnz < out.width) {
      out.column[row * out.width + nnz] = static_cast<uint32_t>(col);
      out.value[row * out.width + nnz] = dense[col];
    }
    ++nnz;
  }
  out.row_nnz[row] = static_cast<int32_t>(nnz);
  if (nnz <= out.width) return;
  TWELL_CHECK(out.tail_rows < out.tail_capacity,
              "row {} has {} non-zeros, the width is {}, and all {} tail rows are used", row, nnz,
              out.width, out.tail_capacity);
  std::copy_n(dense, out.cols, out.tail_values + out.tail_rows * out.cols);
  out.tail[out.tail_rows++] = static_cast<int32_t>(row);
}

// dense[F], given the tail entry that the row would have if it does not fit.
void unpack_row(const Ell& in, int64_t row, int64_t tail_entry, float* dense) {
  if (!in.fits(row)) {
    std::copy_n(in.tail_values + tail_entry * in.cols, in.cols, dense);
    return;
  }
  std::fill_n(dense, in.cols, 0.0f);
  for (int64_t i = 0; i < in.row_nnz[row]; ++i) {
    dense[in.column[row * in.width + i]] = in.value[row * in.width + i];
  }
}

// fn(row, dense [F]) for every row.
template <typename Fn>
void for_each_dense_row(const Ell& in, const Fn& fn) {
  std::vector<float> dense(static_cast<size_t>(in.cols));
  int64_t tail_entry = 0;
  for (int64_t row = 0; row < in.rows; ++row) {
    unpack_row(in, row, tail_entry, dense.data());
    if (!in.fits(row)) ++tail_entry;
    fn(row, dense.data());
  }
}

}  // namespace

void ell_pack_reference(ConstMatrixF dense, Ell& out) {
  TWELL_CHECK(dense.rows == out.rows && dense.cols == out.cols,
              "packing {} x {} into an ELL of {} x {}", dense.rows, dense.cols, out.rows, out.cols);
  out.tail_rows = 0;
  for (int64_t row = 0; row < out.rows; ++row) pack_row(dense.row(row), row, out);
}

void ell_unpack_reference(const Ell& in, MatrixF dense) {
  TWELL_CHECK(dense.rows == in.rows && dense.cols == in.cols,
              "unpacking an ELL of {} x {} into {} x {}", in.rows, in.cols, dense.rows, dense.cols);
  for_each_dense_row(
      in, [&](int64_t row, const float* values) { std::copy_n(values, in.cols, dense.row(row)); });
}

template <typename Word>
void ell_from_twell(const Twell<Word>& in, Ell& out) {
  TWELL_CHECK(in.shape.rows == out.rows && in.shape.cols == out.cols,
              "converting a TwELL of {} x {} into an ELL of {} x {}", in.shape.rows, in.shape.cols,
              out.rows, out.cols);
  out.tail_rows = 0;
  std::vector<float> dense(static_cast<size_t>(out.cols));
  for (int64_t row = 0; row < out.rows; ++row) {
    std::fill(dense.begin(), dense.end(), 0.0f);
    twell_for_each(
        in, row, [&](int64_t column, float value) { dense[static_cast<size_t>(column)] = value; });
    pack_row(dense.data(), row, out);
  }
}

template <typename Word>
void twell_from_ell(const Ell& in, const Twell<Word>& out) {
  std::vector<float> dense(static_cast<size_t>(in.rows * in.cols));
  const MatrixF matrix(dense.data(), in.rows, in.cols);
  ell_unpack_reference(in, matrix);
  twell_pack_reference<Word>(matrix, out);
}

template void ell_from_twell<uint32_t>(const Twell<uint32_t>&, Ell&);
template void ell_from_twell<uint64_t>(const Twell<uint64_t>&, Ell&);
template void twell_from_ell<uint32_t>(const Ell&, const Twell<uint32_t>&);
template void twell_from_ell<uint64_t>(const Ell&, const Twell<uint64_t>&);

}  // namespace twell
