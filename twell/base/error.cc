// SPDX-License-Identifier: Apache-2.0
#include "twell/base/error.h"

namespace twell {

void throw_error(const char* file, int line, const std::string& message) {
  throw Error(fmt::format("{} ({}:{})", message, file, line));
}

}  // namespace twell
