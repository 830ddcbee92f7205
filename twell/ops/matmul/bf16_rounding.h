// SPDX-License-Identifier: Apache-2.0
// Weights and activations as factors of bf16 products. Internal to matmul.
#pragma once

#include <cstddef>
#include <cstdint>

#include "twell/base/dtype.h"

namespace twell {

// out[i] = the i-th of `count` values of a dtype, without scales, rounded as to_bf16 does; Highway,
// dispatched at run time.
void round_to_bf16(const std::byte* values, DType dtype, int64_t count, BF16* out);

}  // namespace twell
