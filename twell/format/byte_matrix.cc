// SPDX-License-Identifier: Apache-2.0
#include "twell/format/byte_matrix.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "twell/base/error.h"

namespace twell {

std::string_view byte_type_name(ByteType type) {
  return type == ByteType::kE4M3 ? "F8_E4M3" : "I8";
}

uint8_t to_e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (magnitude >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);  // 448 and more
  if (magnitude < 0x3c800000u) {
    // Below 2^-6, the least normal value: multiples of 2^-9. Adding 2^14 makes its last bit 2^-9,
    // so that the addition rounds to even.
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x46800000u));
  }
  // Rounding may carry into the exponent, but not past 448: what is below rounds to it at most.
  const uint32_t rounding = 0x7ffffu + (magnitude >> 20 & 1u);
  return static_cast<uint8_t>(sign | ((magnitude + rounding - (120u << 23)) >> 20));
}

float e4m3_to_float(uint8_t bits) {
  const float sign = (bits & 0x80u) != 0 ? -1.0f : 1.0f;
  const int exponent = bits >> 3 & 0xf, mantissa = bits & 7;
  if ((bits & 0x7fu) == 0x7fu) return std::bit_cast<float>(0x7fc00000u);
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -9);
  return sign * std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
}

float byte_to_float(ByteType type, uint8_t bits) {
  return type == ByteType::kE4M3 ? e4m3_to_float(bits)
                                 : static_cast<float>(static_cast<int8_t>(bits));
}

OwnedByteMatrix::OwnedByteMatrix(ByteType type_in, int64_t rows_in, int64_t cols_in)
    : type(type_in),
      rows(rows_in),
      cols(cols_in),
      values(static_cast<size_t>(rows_in * cols_in)),
      scales(static_cast<size_t>(rows_in)) {}

float quantise_row(ByteType type, std::span<const float> row, std::span<uint8_t> values) {
  TWELL_CHECK(row.size() == values.size(), "{} values of a row of {}", values.size(), row.size());
  float largest = kLeastLargest;
  for (size_t i = 0; i < row.size(); ++i) {
    TWELL_REQUIRE(std::isfinite(row[i]), "the value {} in column {} has no 8-bit form", row[i], i);
    largest = std::max(largest, std::abs(row[i]));
  }
  const float most = most_of(type), inverse = most / largest;
  for (size_t i = 0; i < row.size(); ++i) {
    const float scaled = row[i] * inverse;
    if (type == ByteType::kE4M3) {
      values[i] = to_e4m3(scaled);
    } else {
      const float rounded = std::clamp(std::nearbyint(scaled), -most, most);
      values[i] = static_cast<uint8_t>(static_cast<int8_t>(rounded));
    }
  }
  return largest / most;
}

OwnedByteMatrix quantise_rows(ByteType type, ConstMatrixF matrix) {
  OwnedByteMatrix out(type, matrix.rows, matrix.cols);
  const auto cols = static_cast<size_t>(matrix.cols);
  for (int64_t row = 0; row < matrix.rows; ++row) {
    const auto r = static_cast<size_t>(row);
    out.scales[r] =
        quantise_row(type, {matrix.row(row), cols}, std::span(out.values).subspan(r * cols, cols));
  }
  return out;
}

void dequantise_row(ByteType type, std::span<const uint8_t> values, float scale,
                    std::span<float> out) {
  TWELL_CHECK(values.size() == out.size(), "{} values for {}", values.size(), out.size());
  for (size_t i = 0; i < values.size(); ++i) out[i] = byte_to_float(type, values[i]) * scale;
}

}  // namespace twell
