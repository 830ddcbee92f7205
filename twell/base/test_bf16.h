// SPDX-License-Identifier: Apache-2.0
// Shared by GPU tests, beyond cuda_testing.h: random bf16 values, small ones whose sums are exact,
// and conversions.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "twell/base/rng.h"

namespace twell {

inline std::vector<__nv_bfloat16> random_bf16(int64_t n, uint64_t stream, float scale = 1.0f) {
  std::vector<__nv_bfloat16> values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = __float2bfloat16(scale * normal(17, stream, i));
  }
  return values;
}

// Random values of -1, 0 or 1.
inline std::vector<int8_t> random_signs(int64_t n, uint64_t stream) {
  std::vector<int8_t> values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); i += 4) {
    const auto bits = philox(9, stream, i / 4);
    for (size_t j = i; j < std::min(i + 4, values.size()); ++j) {
      values[j] = static_cast<int8_t>(static_cast<int>(bits[j - i] % 3) - 1);
    }
  }
  return values;
}

inline int dot_of_signs(const int8_t* a, const int8_t* b, int64_t n) {
  int sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

inline float rounded_to_bf16(float value) { return __bfloat162float(__float2bfloat16(value)); }

template <typename T>
std::vector<__nv_bfloat16> to_bf16s(const std::vector<T>& values) {
  std::vector<__nv_bfloat16> out(values.size());
  for (size_t i = 0; i < values.size(); ++i)
    out[i] = __float2bfloat16(static_cast<float>(values[i]));
  return out;
}

inline std::vector<float> to_floats(const std::vector<__nv_bfloat16>& values) {
  std::vector<float> floats(values.size());
  for (size_t i = 0; i < values.size(); ++i) floats[i] = __bfloat162float(values[i]);
  return floats;
}

}  // namespace twell
