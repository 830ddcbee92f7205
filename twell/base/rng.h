// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10 (Salmon et al., 2011): random numbers as a pure function of (seed, stream, index).
// No state to save: a resumed run draws exactly what the uninterrupted one would have.
#pragma once

#include <array>
#include <cstdint>

namespace twell {

// 128 random bits for one index of one stream.
std::array<uint32_t, 4> philox(uint64_t seed, uint64_t stream, uint64_t index);

// Uniform in [0, 1), 24 bits.
float uniform(uint64_t seed, uint64_t stream, uint64_t index);
// Uniform integer in [0, n), n > 0, without modulo bias beyond 2^-64.
uint64_t uniform_below(uint64_t seed, uint64_t stream, uint64_t index, uint64_t n);
// Standard normal (Box-Muller on one Philox block).
float normal(uint64_t seed, uint64_t stream, uint64_t index);

}  // namespace twell
