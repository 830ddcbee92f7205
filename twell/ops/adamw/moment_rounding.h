// SPDX-License-Identifier: Apache-2.0
// AdamW's moments in bf16, rounded stochastically: up with the probability that makes the expected
// value the exact one. To nearest, a moment would not move at all while its change is below half of
// bf16's last place, 1/512 to 1/256 of it: v would stop decaying with beta2 above 0.996, and never
// decay above 0.998. The random bits are a
// function of the run's seed, the step and the parameter's place, so CPU, GPU and any number of
// ranks round alike, and a resumed run repeats.
#pragma once

#include <cstdint>

#include "twell/base/philox.h"

namespace twell {

// Parameters that share 128 random bits: 16 for each moment of each.
inline constexpr int64_t kRoundingGroup = 4;
inline constexpr uint64_t kRoundingStream =
    0x6d6f'6d65'0000'0000;  // "mome" in ASCII, plus the step

TWELL_HOST_DEVICE inline PhiloxBits rounding_bits(uint64_t seed, int64_t step, int64_t group) {
  return philox_bits(seed, kRoundingStream + static_cast<uint64_t>(step),
                     static_cast<uint64_t>(group));
}

// Rounds the bits of a finite f32 to those of a bf16 in f32: adds 16 random bits and cuts off.
TWELL_HOST_DEVICE inline uint32_t round_stochastically(uint32_t bits, uint32_t random16) {
  return (bits + (random16 & 0xffffu)) & 0xffff0000u;
}

}  // namespace twell
