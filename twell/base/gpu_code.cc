// SPDX-License-Identifier: Apache-2.0
#include "twell/base/gpu_code.h"

#include <fmt/format.h>

#include "twell/base/error.h"
#include "twell/base/no_hopper.h"

namespace twell {

std::string gpu_capability_text(int capability) {
  return fmt::format("{}.{}", capability / 10, capability % 10);
}

std::string gpu_code_text(const GpuCode& code, std::span<const int> built) {
  if (std::ranges::find(built, code.binary) != built.end()) {
    std::string text = fmt::format("native code for {}", gpu_capability_text(code.binary));
    if (code.ptx < code.binary) {
      text += fmt::format(", made of PTX for {}", gpu_capability_text(code.ptx));
    }
    return text;
  }
  return fmt::format("PTX for {}, which the driver compiles for {}", gpu_capability_text(code.ptx),
                     gpu_capability_text(code.binary));
}

void no_hopper_kernel(std::string_view kernel) {
  throw Error(fmt::format("{}: a kernel of Hopper, which a portable build does not have", kernel));
}

}  // namespace twell
