// SPDX-License-Identifier: Apache-2.0
// Messages to the user go to a sink that the caller passes in; the library prints nothing.
#pragma once

#include <functional>
#include <string_view>

namespace twell {

enum class LogLevel { kInfo, kWarning };

// May be empty: then nothing is reported.
using LogSink = std::function<void(LogLevel level, std::string_view message)>;

}  // namespace twell
