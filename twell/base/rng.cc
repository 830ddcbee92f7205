// SPDX-License-Identifier: Apache-2.0
#include "twell/base/rng.h"

#include <cmath>
#include <numbers>

namespace twell {

std::array<uint32_t, 4> philox(uint64_t seed, uint64_t stream, uint64_t index) {
  std::array<uint32_t, 4> counter = {
      static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32),
      static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)};
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {
        static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(product1),
        static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(product0)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
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
