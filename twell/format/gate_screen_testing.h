// SPDX-License-Identifier: Apache-2.0
// Scalar reference of gate screens for tests: makes screens and multiplies with them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "twell/base/dtype.h"
#include "twell/base/matrix.h"
#include "twell/format/gate_screen.h"

namespace twell {

struct GateScreenHost {
  std::vector<uint8_t> rows;  // as in GateScreen
  std::vector<float> errors;
};

namespace gate_screen_testing {

// The largest magnitude of a block; NaN is ignored.
inline float largest_of(const BF16* values) {
  float largest = 0.0f;
  for (int i = 0; i < kScreenBlock; ++i) {
    largest = std::fmax(largest, std::fabs(to_float(values[i])));
  }
  return largest;
}

inline int quantised(float weight, float scale) {
  constexpr auto kMost = static_cast<float>(kScreenMostWeight);
  const float steps = scale > 0.0f ? std::rint(weight / scale) : 0.0f;
  return static_cast<int>(std::fmin(std::fmax(steps, -kMost), kMost));
}

// Writes a row and returns its error.
inline float make_row(const BF16* weight, const BF16* norm, int64_t width, uint8_t* out) {
  double off = 0.0, taken = 0.0, all = 0.0;
  float largest = 0.0f;
  for (int64_t piece = 0; piece < width; piece += kScreenPiece) {
    const int64_t columns = std::min<int64_t>(kScreenPiece, width - piece);
    for (int64_t begin = 0; begin < columns; begin += kScreenBlock) {
      const BF16* w = weight + piece + begin;
      const BF16* n = norm + piece + begin;
      const float most = largest_of(w);
      const BF16 stored = to_bf16(most / static_cast<float>(kScreenMostWeight));
      const float scale = to_float(stored);
      std::memcpy(out + columns + begin / kScreenBlock * 2, &stored, sizeof(stored));
      double size = 0.0;
      for (int i = 0; i < kScreenBlock; ++i) {
        const int q = quantised(to_float(w[i]), scale);
        out[begin + i] = static_cast<uint8_t>(static_cast<int8_t>(q));
        const double value = double{to_float(w[i])}, as = double{scale} * q;
        off += std::pow((value - as) * to_float(n[i]), 2);
        all += std::pow(value * to_float(n[i]), 2);
        size += std::fabs(as);
      }
      taken += std::pow(size * largest_of(n), 2);
      largest = std::max(largest, most);
    }
    out += screen_piece_bytes(columns);
  }
  return screen_error(static_cast<float>(width), static_cast<float>(std::sqrt(off)),
                      static_cast<float>(std::sqrt(taken)), static_cast<float>(std::sqrt(all)),
                      largest);
}

}  // namespace gate_screen_testing

// weight [F, D], norm [D], with screens_width(D).
inline GateScreenHost make_gate_screen(Matrix<const BF16> weight, const BF16* norm) {
  const int64_t bytes = screen_row_bytes(weight.cols);
  GateScreenHost screen{std::vector<uint8_t>(static_cast<size_t>(weight.rows * bytes)),
                        std::vector<float>(static_cast<size_t>(weight.rows))};
  for (int64_t row = 0; row < weight.rows; ++row) {
    screen.errors[static_cast<size_t>(row)] = gate_screen_testing::make_row(
        weight.row(row), norm, weight.cols, screen.rows.data() + row * bytes);
  }
  return screen;
}

// The product of a row with x [D], to within the row's error.
inline double screen_product(const uint8_t* row, const BF16* x, int64_t width) {
  double product = 0.0;
  for (int64_t piece = 0; piece < width; piece += kScreenPiece) {
    const int64_t columns = std::min<int64_t>(kScreenPiece, width - piece);
    for (int64_t begin = 0; begin < columns; begin += kScreenBlock) {
      const BF16* block = x + piece + begin;
      uint16_t most = 0;  // bits of magnitudes order as the magnitudes do, with NaN last
      for (int i = 0; i < kScreenBlock; ++i) {
        most = std::max(most, static_cast<uint16_t>(block[i].bits & 0x7fff));
      }
      const float largest = to_float(BF16{most});
      if (largest == 0.0f) continue;
      if (!screen_takes(largest)) return std::numeric_limits<double>::quiet_NaN();
      int64_t sum = 0;
      for (int i = 0; i < kScreenBlock; ++i) {
        sum += static_cast<int8_t>(row[begin + i]) *
               std::lrint(to_float(block[i]) * (kScreenSteps / largest));
      }
      BF16 scale;
      std::memcpy(&scale, row + columns + begin / kScreenBlock * 2, sizeof(scale));
      product += double{to_float(scale)} * (largest / kScreenSteps) * static_cast<double>(sum);
    }
    row += screen_piece_bytes(columns);
  }
  return product;
}

}  // namespace twell
