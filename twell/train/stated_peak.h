// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace twell {

// Dense bf16 products in FLOP per second that the maker states for a GPU, at its boost clock: what
// MFU is a share of. 0 for a device that is not in the table.
double stated_peak_flops(std::string_view device_name);

}  // namespace twell
