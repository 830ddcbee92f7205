// SPDX-License-Identifier: Apache-2.0
// What GPU tests share on top of cuda_testing.h: random bf16 values, and bf16 as floats.
#pragma once

#include <cuda_bf16.h>

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

inline std::vector<float> to_floats(const std::vector<__nv_bfloat16>& values) {
  std::vector<float> floats(values.size());
  for (size_t i = 0; i < values.size(); ++i) floats[i] = __bfloat162float(values[i]);
  return floats;
}

}  // namespace twell
