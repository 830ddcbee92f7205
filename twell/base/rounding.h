// SPDX-License-Identifier: Apache-2.0
// Integer division that rounds up, for non-negative numbers and positive divisors.
#pragma once

#include <concepts>

#include "twell/base/host_device.h"

namespace twell {

TWELL_HOST_DEVICE constexpr auto ceil_div(std::integral auto n, std::integral auto by) {
  return (n + by - 1) / by;
}
// Rounds up to a multiple of `step`.
TWELL_HOST_DEVICE constexpr auto round_up(std::integral auto n, std::integral auto step) {
  return ceil_div(n, step) * step;
}

}  // namespace twell
