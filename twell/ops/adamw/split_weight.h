// SPDX-License-Identifier: Apache-2.0
// An f32 weight in two halves: the nearest bf16 (ties away from zero), with which layers compute,
// and the remainder. So the layers' copy takes no extra memory and no bit is lost:
//   bits(weight) = 65536 * bits(bf16) + rest, modulo 2^32
#pragma once

#include <cstdint>

#include "twell/base/host_device.h"

namespace twell {

struct SplitWeight {
  uint16_t bf16 = 0;
  int16_t rest = 0;
};

TWELL_HOST_DEVICE inline SplitWeight split_weight(uint32_t bits) {
  const uint32_t rounded = (bits + 0x8000u) & 0xffff0000u;
  return {static_cast<uint16_t>(rounded >> 16), static_cast<int16_t>(bits - rounded)};
}

TWELL_HOST_DEVICE inline uint32_t join_weight(SplitWeight weight) {
  return (uint32_t{weight.bf16} << 16) + static_cast<uint32_t>(int32_t{weight.rest});
}

}  // namespace twell
