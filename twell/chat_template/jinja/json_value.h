// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "twell/chat_template/jinja/value.h"

namespace twell::jinja {

// The value of a JSON text, in time linear in its length but for the sorting of keys. Of a repeated
// key the last value counts. InputError, which begins with `what`, when the text is not JSON, is
// nested more than kMaxDepth deep, or has a number that is too large.
Value parse_json(std::string_view text, std::string_view what);

}  // namespace twell::jinja
