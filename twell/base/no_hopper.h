// SPDX-License-Identifier: Apache-2.0
// What a portable build (gpu_code.h) has in place of a kernel of Hopper, without_sm90_cuda.cc.
#pragma once

#include <string_view>

namespace twell {

// Throws Error: no choice of a kernel leads there.
[[noreturn]] void no_hopper_kernel(std::string_view kernel);

}  // namespace twell
