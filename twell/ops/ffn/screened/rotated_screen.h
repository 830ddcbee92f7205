// SPDX-License-Identifier: Apache-2.0
// Rotated screens: 8-bit copies of x and w_gate whose product says which neurons may fire for a
// token, at twice the rate of the bf16 product. Only candidates are then computed in bf16, so the
// layer's result does not change.
//
// Rows of x and of w_gate are rotated alike, which leaves the signs of their products as they are
// and spreads outliers over a block: signs from a fixed seed, then a Hadamard transform (of +1 and
// -1, not normalised) of each block of hadamard_block(D) columns, whose results are stored in the
// order of rotated_position. A rotated row r is taken as scale * values + error, values in
// [-127, 127], scale = max |r| / 127. D is a multiple of 16.
//
// The screen of token t and neuron n is the integer
//   (sum over D of x8[t] w8[n]) << screen_shift(D)  +  base[t] + slope[t] * spread[n]
// and n is a candidate for t if it is 0 or above. base, slope and spread bound what rounding can
// take from the product, in units of the two scales (docs/numerics.md derives both bounds):
//   strict         Cauchy and Schwarz; a neuron that is no candidate cannot fire.
//   probabilistic  values are rounded stochastically, up or down with the probability that makes
//                  the mean right. By Hoeffding's inequality a neuron that fires is missed with a
//                  probability of at most exp(-k^2 / 2), k = kScreenDeviations: 1.3e-14.
// Both include the rounding of the f32 sums of the bf16 product itself. Random bits belong to a
// column, so that a row's result does not depend on the other rows or on its place among them.
//
// Sums stay in 32 bits: |values product| <= 127^2 D, shifted at most 2^30; base and slope * spread
// at most 2^29 each. Rows that are not finite, or whose rotated values rotation_takes() does not
// take, have values 0: as a token, base 2^29 and slope 0, so that all neurons are candidates; as a
// weight row, spread kScreenAlways, so that it is a candidate for every token. A token of zeros has
// values 0, slope 1 and base -kScreenMostSpread - 1, so that only such weight rows are its
// candidates.
#pragma once

#include <cstdint>

#include "twell/base/host_device.h"

namespace twell {

enum class ScreenBound { kStrict, kProbabilistic };

inline constexpr float kScreenDeviations = 8.0f;
inline constexpr int32_t kScreenMostBase = 1 << 29;
inline constexpr int32_t kScreenMostSlope = (1 << 14) - 1;
inline constexpr int32_t kScreenMostSpread = (1 << 14) - 1;
inline constexpr int32_t kScreenAlways = 1 << 15;

// Columns of one Hadamard transform: the largest power of two that divides D, at most 4096.
TWELL_HOST_DEVICE constexpr int hadamard_block(int64_t width) {
  const int64_t block = width & -width;
  return static_cast<int>(block < 4096 ? block : 4096);
}

// 4 up to D = 4096, then less, so that shifted products stay below 2^30.
TWELL_HOST_DEVICE constexpr int screen_shift(int64_t width) {
  int shift = 4;
  while (shift > 0 && (int64_t{127 * 127} * width << shift) > (int64_t{1} << 30)) --shift;
  return shift;
}

// Whether rows of this width can be screened: int8 rows are 16-byte aligned, and one SM holds a
// row.
inline constexpr int64_t kMaxRotatedWidth = 16384;
constexpr bool can_rotate(int64_t width) {
  return width > 0 && width % 16 == 0 && width <= kMaxRotatedWidth;
}

// Whether a row is quantised whose rotated values are at most this in magnitude. False for 0, NaN
// and what is so large or small that squares or products of bf16 values could leave f32's range.
TWELL_HOST_DEVICE constexpr bool rotation_takes(float largest) {
  return largest >= 0x1p-40f && largest <= 0x1p50f;
}

// Random bits as a function of an index (the finaliser "lowbias32" of C. Wellons, which flips each
// output bit with a probability of 1/2 for each input bit).
TWELL_HOST_DEVICE constexpr uint32_t screen_bits(uint32_t index) {
  index ^= index >> 16;
  index *= 0x7feb352du;
  index ^= index >> 15;
  index *= 0x846ca68bu;
  return index ^ (index >> 16);
}
// Signs of the eight columns from 8 * piece on: column 2 k + i of them is negated if bit 15 - k +
// 16 i is set, so that the word shifted left by k has the signs of a pair of bf16 values.
TWELL_HOST_DEVICE constexpr uint32_t rotation_signs(uint32_t piece) {
  return screen_bits(piece + 0x51ed2701u);
}
TWELL_HOST_DEVICE constexpr bool rotation_negates(int64_t column) {
  const auto within = static_cast<uint32_t>(column % 8);
  return (rotation_signs(static_cast<uint32_t>(column / 8)) >> (15 - within / 2 + within % 2 * 16) &
          1) != 0;
}
// The random number of stochastic rounding at a stored position, in steps of 2^-16; independent for
// rows of x and of w_gate.
TWELL_HOST_DEVICE constexpr uint32_t screen_random(int64_t position, bool of_gate) {
  return screen_bits(2 * static_cast<uint32_t>(position) + (of_gate ? 1u : 0u) + 0xa3c59ac3u) >> 16;
}

// log2 of the distance of the columns that are stored side by side, 16 at a time: a thread has them
// after the last step of its transform.
TWELL_HOST_DEVICE constexpr int rotated_distance(int64_t width) {
  const int block = hadamard_block(width);
  return block >= 128 ? 3 : block == 64 ? 2 : block == 32 ? 1 : 0;
}
// Where the rotated value of a column is stored.
TWELL_HOST_DEVICE constexpr int64_t rotated_position(int64_t column, int64_t width) {
  const int distance = rotated_distance(width);
  const int64_t group =
      column >> (distance + 4) << distance | (column & ((int64_t{1} << distance) - 1));
  return group * 16 + (column >> distance & 15);
}

// What slope and spread count, so that both keep their precision within their ranges:
//   strict         spread = |w8| / 2,          slope = 2^(shift + 1) (error of x8)
//   probabilistic  spread = |W|^2 / (8 D),     slope = 2^shift 8 D (the bound's factor of |W|^2)
inline constexpr int kScreenSquares = 8;
// The probabilistic bound is best where |W|^2 / D, W the rotated row in steps, is this squared. It
// is 33 to 39 squared where rotated values are distributed normally, and the bound holds for all.
inline constexpr float kScreenTypical = 35.0f;

// The bound on the error of f32 sums of D products, relative to |x| |w|, as tensor cores and other
// kernels add them.
TWELL_HOST_DEVICE constexpr float screen_sum_error(int64_t width) {
  return (static_cast<float>(width) + 128.0f) * 0x1p-23f;
}

struct TokenBound {
  int32_t base, slope;
};

// 8-bit rows of w_gate [F, D], device memory, 16-byte aligned.
struct RotatedGateCuda {
  const int8_t* values = nullptr;   // [F, D]; null: no screen
  const int32_t* spread = nullptr;  // [F rounded up to 256]; 0 past F
  const float* rounding = nullptr;  // [1] strict: the largest error of a row; else unused
  ScreenBound bound = ScreenBound::kStrict;
};

// 8-bit rows of x [M, D], device memory, 16-byte aligned.
struct RotatedRowsCuda {
  int8_t* values = nullptr;      // [M, D]
  TokenBound* bounds = nullptr;  // [M]
};

}  // namespace twell
