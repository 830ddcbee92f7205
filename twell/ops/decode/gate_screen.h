// SPDX-License-Identifier: Apache-2.0
// A second, 8-bit copy of the weights that decide which neurons fire, with a bound on how far a
// product with it can be off: a neuron whose product is below zero by more than that does not fire,
// and its row of bf16 need not be read. What the others do is computed from the bf16 rows, so that
// the layer's result is the same, on every input, at half the bytes.
//
// A row: pieces of kScreenPiece columns, each as its values q (signed bytes) and then a bf16 scale
// s for each kScreenBlock columns, padded to 16 bytes; a weight is nearly s * q.
//
// The bound is for x = rms_norm(.), whose norm is at most sqrt(D) before it is multiplied by the
// norm's weights n, taken as X * step: 16-bit integers with a step for each kScreenBlock values. By
// Cauchy and Schwarz, with d = w - s q, element by element,
//   |w x - sum (s q) (step X)| <= sqrt(D) (|d n| + what x is off by + what f32 sums are off by).
// A row or an x that is not finite, or an x too small for its steps, makes the product or the bound
// NaN or the bound infinite; so "does not fire" is asked as product < -error, which is false then.
#pragma once

#include <cmath>
#include <cstdint>

#include "twell/base/host_device.h"

namespace twell {

inline constexpr int kScreenBlock = 64;     // columns of one scale
inline constexpr int kScreenPiece = 2048;   // columns
inline constexpr int kScreenSteps = 32512;  // of x: its largest value, in steps; 127 * 256
inline constexpr int kScreenMostWeight = 127;

// Whether a block of x with this largest size, but for 0, has steps that keep their digits as a
// float. NaN: no.
TWELL_HOST_DEVICE constexpr bool screen_takes(float largest) {
  return largest >= 1e-30f && largest <= 1e36f;
}

// A width that there are screens for.
constexpr bool screens_width(int64_t width) { return width % kScreenBlock == 0; }

TWELL_HOST_DEVICE constexpr int64_t screen_piece_bytes(int64_t columns) {
  return columns + (columns / kScreenBlock * 2 + 15) / 16 * 16;
}
TWELL_HOST_DEVICE constexpr int64_t screen_row_bytes(int64_t width) {
  return width / kScreenPiece * screen_piece_bytes(kScreenPiece) +
         screen_piece_bytes(width % kScreenPiece);
}

// How far a product with x can be off: `off` = |d n|, `taken` = the root of the sum over blocks of
// (|s q|_1 max |n|)^2, `all` = |w n|, `largest` = max |w|.
//   x is off by at most 0.52 steps, a step being max |x| of the block / kScreenSteps.
//   f32 sums of D products, here and of bf16 rows, are off by 2^-23 D of the products' sizes.
//   2%: x is rounded to bf16 behind its norm, and these sums are rounded too.
// Without a bound where the squares were too small for that.
TWELL_HOST_DEVICE inline float screen_error(float width, float off, float taken, float all,
                                            float largest) {
  if (largest > 0.0f && all < 1e-12f) return INFINITY;
  constexpr float kStep = 0.52f / kScreenSteps, kSum = 1.0f / (1 << 23);
  return 1.02f * sqrtf(width) * (off + kStep * taken + (width + 128.0f) * kSum * all);
}

// Device memory; rows 16-byte aligned.
struct GateScreen {
  const uint8_t* rows = nullptr;  // [F, screen_row_bytes(D)]; null: none
  const float* errors = nullptr;  // [F] how far a product with x can be off
};

}  // namespace twell
