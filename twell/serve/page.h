// SPDX-License-Identifier: Apache-2.0
// The page at /: a chat with the model and the activity of its layers, as one HTML text. It asks
// /activity, /v1/chat/completions and /v1/completions, and loads nothing else.
#pragma once

#include <string_view>

namespace twell {

std::string_view page_html();

}  // namespace twell
