// SPDX-License-Identifier: Apache-2.0
// For tests: a matrix of normal random values, or of NaN ("poisoned"), with NaN between its rows,
// which reveals an op that misses an element or leaves its rows.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "twell/base/matrix.h"
#include "twell/base/rng.h"

namespace twell {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class TestMatrix {
 public:
  // Poisoned: every value is NaN.
  TestMatrix(int64_t rows, int64_t cols, int64_t gap = 0)
      : rows_(rows),
        cols_(cols),
        gap_(gap),
        values_(static_cast<size_t>(rows * (cols + gap)), kNan) {}
  static TestMatrix random(int64_t rows, int64_t cols, uint64_t stream, int64_t gap = 0) {
    TestMatrix matrix(rows, cols, gap);
    for (int64_t i = 0; i < rows * cols; ++i) {
      matrix(i / cols, i % cols) = normal(42, stream, static_cast<uint64_t>(i));
    }
    return matrix;
  }

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  float* data() { return values_.data(); }
  const float* data() const { return values_.data(); }
  MatrixF view() { return {values_.data(), rows_, cols_, cols_ + gap_}; }
  ConstMatrixF view() const { return {values_.data(), rows_, cols_, cols_ + gap_}; }
  float& operator()(int64_t r, int64_t c) { return view()(r, c); }
  float operator()(int64_t r, int64_t c) const { return view()(r, c); }

  // Equal bit for bit, the gaps included.
  bool same_bits(const TestMatrix& other) const {
    return values_.size() == other.values_.size() &&
           std::memcmp(values_.data(), other.values_.data(), values_.size() * sizeof(float)) == 0;
  }
  bool gaps_untouched() const {
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = cols_; c < cols_ + gap_; ++c) {
        if (!std::isnan(values_[static_cast<size_t>(r * (cols_ + gap_) + c)])) return false;
      }
    }
    return true;
  }

 private:
  int64_t rows_, cols_, gap_;
  std::vector<float> values_;
};

}  // namespace twell
