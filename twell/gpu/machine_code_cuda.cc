// SPDX-License-Identifier: Apache-2.0
// Not in machine_code.cu, because nvcc divides the values of macros at their commas.
#include "twell/gpu/machine_code_cuda.h"

namespace twell {
namespace {

constexpr int kBuilt[] = {0, TWELL_MACHINE_CODE};  // none in a portable build of PTX alone

}  // namespace

std::span<const int> built_machine_code() { return std::span(kBuilt).subspan(1); }

}  // namespace twell
