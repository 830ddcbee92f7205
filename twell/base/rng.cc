// SPDX-License-Identifier: Apache-2.0
#include "twell/base/rng.h"

#include <cmath>
#include <numbers>

#include "twell/base/philox.h"

namespace twell {

std::array<uint32_t, 4> philox(uint64_t seed, uint64_t stream, uint64_t index) {
  const PhiloxBits bits = philox_bits(seed, stream, index);
  return {bits.word[0], bits.word[1], bits.word[2], bits.word[3]};
}

float uniform(uint64_t seed, uint64_t stream, uint64_t index) {
  return static_cast<float>(philox(seed, stream, index)[0] >> 8) * 0x1p-24f;
}

uint64_t uniform_below(uint64_t seed, uint64_t stream, uint64_t index, uint64_t n) {
  const auto bits = philox(seed, stream, index);
  const uint64_t value = (static_cast<uint64_t>(bits[1]) << 32) | bits[0];
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>((static_cast<Wide>(value) * n) >> 64);
}

float normal(uint64_t seed, uint64_t stream, uint64_t index) {
  const auto bits = philox(seed, stream, index);
  // (0, 1] keeps the logarithm finite.
  const double u1 = (static_cast<double>(bits[0]) + 1.0) * 0x1p-32;
  const double u2 = static_cast<double>(bits[1]) * 0x1p-32;
  return static_cast<float>(std::sqrt(-2.0 * std::log(u1)) * std::cos(2.0 * std::numbers::pi * u2));
}

}  // namespace twell
