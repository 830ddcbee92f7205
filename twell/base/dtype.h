// SPDX-License-Identifier: Apache-2.0
// Element types of stored tensors, and the 16-bit float conversions.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace twell {

// kI8: signed bytes that have scales elsewhere; of weights in memory alone
// (format/weight_matrix.h).
enum class DType { kF32, kF16, kBF16, kI8 };

size_t dtype_size(DType dtype);
// Safetensors spelling: "F32", "F16", "BF16", "I8".
std::string_view dtype_name(DType dtype);

// bfloat16 storage: the upper half of an IEEE float32.
struct BF16 {
  uint16_t bits = 0;
};

inline float to_float(BF16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

// Round to nearest, ties to even; NaN stays NaN.
inline BF16 to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return BF16{static_cast<uint16_t>((bits >> 16) | 0x0040u)};
  }
  const uint32_t rounding = 0x7fffu + ((bits >> 16) & 1u);
  return BF16{static_cast<uint16_t>((bits + rounding) >> 16)};
}

// IEEE binary16 from and to float32, subnormals included, round to nearest even.
float f16_to_float(uint16_t bits);
uint16_t float_to_f16(float value);

}  // namespace twell
