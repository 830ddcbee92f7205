// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

#include "twell/chat_template/jinja/budget.h"
#include "twell/chat_template/jinja/syntax.h"

namespace twell::jinja {

using Variables = std::map<std::string, Value, std::less<>>;

// Renders the template. InputError names the source, the line, and what is not supported or makes
// no sense, or gives the message that the template raised. Several threads may render at once.
std::string render(const Template& tree, const Variables& variables, const std::string& source,
                   const RenderLimits& limits = {});

}  // namespace twell::jinja
