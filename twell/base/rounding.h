// SPDX-License-Identifier: Apache-2.0
// Integer division that rounds up. Of numbers that are not negative, by positive ones.
#pragma once

#include <cstdint>

namespace twell {

constexpr int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
// To a multiple of `step`.
constexpr int64_t round_up(int64_t n, int64_t step) { return ceil_div(n, step) * step; }

}  // namespace twell
