// SPDX-License-Identifier: Apache-2.0
// Runs a parsed chat template. Internal to data.
#pragma once

#include <map>
#include <string>

#include "twell/chat_template/jinja_syntax.h"

namespace twell::jinja {

// InputError names the source, the line, and the filter, test, method or function that is not
// supported, or says what the template itself raised. Bounded in output and work, whatever the
// template does.
std::string render(const Body& body, const std::map<std::string, Value>& variables,
                   const std::string& source);

}  // namespace twell::jinja
