// SPDX-License-Identifier: Apache-2.0
// Gate screens: an 8-bit copy of the weights that decide which neurons are active, with a bound on
// the error of products with it. A neuron whose product is below zero by more than the bound is not
// active, so that its bf16 row need not be read. All others are computed from their bf16 rows: the
// layer's result is the same on every input, at half the bytes.
//
// A row is stored in pieces of kScreenPiece columns. A piece is its values q (signed bytes), then a
// bf16 scale s for each kScreenBlock columns, padded to 16 bytes; a weight is about s * q.
//
// The bound holds for x = rms_norm(.), whose norm is at most sqrt(D) before it is multiplied by the
// norm's weights n. x is taken as X * step: 16-bit integers X, one step per kScreenBlock values. By
// Cauchy and Schwarz, with d = w - s q, element by element,
//   |w x - sum (s q) (step X)| <= sqrt(D) (|d n| + error of step X + error of f32 sums).
// Where a row or x is not finite, or x is too small for its steps, the product or the bound is NaN
// or the bound is infinite. Callers test product < -error, which is then false.
#pragma once

#include <cmath>
#include <cstdint>

#include "twell/base/host_device.h"

namespace twell {

inline constexpr int kScreenBlock = 64;     // columns of one scale
inline constexpr int kScreenPiece = 2048;   // columns
inline constexpr int kScreenSteps = 32512;  // x's largest value in steps: 127 * 256
inline constexpr int kScreenMostWeight = 127;

// Whether the steps of a block of x whose largest magnitude is this are normal floats. False for 0
// (whose steps are 0) and NaN.
TWELL_HOST_DEVICE constexpr bool screen_takes(float largest) {
  return largest >= 1e-30f && largest <= 1e36f;
}

// Whether rows of this width can have screens.
constexpr bool screens_width(int64_t width) { return width % kScreenBlock == 0; }

TWELL_HOST_DEVICE constexpr int64_t screen_piece_bytes(int64_t columns) {
  return columns + (columns / kScreenBlock * 2 + 15) / 16 * 16;
}
TWELL_HOST_DEVICE constexpr int64_t screen_row_bytes(int64_t width) {
  return width / kScreenPiece * screen_piece_bytes(kScreenPiece) +
         screen_piece_bytes(width % kScreenPiece);
}

// The bound on a product's error, for `off` = |d n|, `taken` = the square root of the sum over
// blocks of (|s q|_1 max |n|)^2, `all` = |w n|, `largest` = max |w|:
//   - x is off by at most 0.52 steps, a step being max |x| of the block / kScreenSteps;
//   - f32 sums of D products, here and with bf16 rows, are off by 2^-23 D of the products'
//   magnitudes;
//   - 2% cover that x is rounded to bf16 after its norm, and the rounding of the sums above.
// Infinite where the squares underflow.
TWELL_HOST_DEVICE inline float screen_error(float width, float off, float taken, float all,
                                            float largest) {
  if (largest > 0.0f && all < 1e-12f) return INFINITY;
  constexpr float kStep = 0.52f / kScreenSteps, kSum = 1.0f / (1 << 23);
  return 1.02f * sqrtf(width) * (off + kStep * taken + (width + 128.0f) * kSum * all);
}

// A layer's screen, in device memory; rows 16-byte aligned.
struct GateScreen {
  const uint8_t* rows = nullptr;  // [F, screen_row_bytes(D)]; null: no screen
  const float* errors = nullptr;  // [F] bounds
};

}  // namespace twell
