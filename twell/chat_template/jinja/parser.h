// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "twell/chat_template/jinja/syntax.h"

namespace twell::jinja {

// The syntax tree, with the places of its variables. InputError names the source, the line and the
// fault.
Template parse_template(std::string_view text, const std::string& source);

// Sets the places of variables, in scopes.cc.
void resolve_variables(Template& tree, const std::string& source);

}  // namespace twell::jinja
