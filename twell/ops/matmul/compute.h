// SPDX-License-Identifier: Apache-2.0
// How the CPU multiplies matrices of more than 16 rows (matmul.h): prompts, and all of training.
#pragma once

#include <string_view>

#include "twell/base/context.h"

namespace twell {

enum class MatmulCompute {
  kF32,
  // A and B are rounded to bf16, sums are f32: by AVX512_BF16 or AMX, through oneDNN. Each value is
  // off by 2^-9 of itself at most, B not at all where it is stored in bf16 or in signed bytes.
  kBF16,
  // The same products in f32 arithmetic, on any processor: the reference for kBF16.
  kRoundedF32,
};

// "f32" or "bf16"; InputError for others, and for bf16 where the processor does not multiply it:
// oneDNN would emulate it there, slower than f32, or refuse.
MatmulCompute parse_matmul_compute(std::string_view name);
bool has_bf16_products();

// For all later products of this context; f32 before the first call.
void set_matmul_compute(Context& ctx, MatmulCompute compute);
MatmulCompute matmul_compute(Context& ctx);

}  // namespace twell
