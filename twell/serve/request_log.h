// SPDX-License-Identifier: Apache-2.0
// A request as a line of the server's log: what it was and cost, nothing of what it said.
#pragma once

#include <string>

#include "twell/serve/http_server.h"

namespace twell {

// {"time": "2026-11-27T08:15:30.123Z", "method", "path", "status", "prompt_tokens",
// "completion_tokens", "seconds"} and a line feed. Tokens are null where there were none to count.
// A path ends after 200 bytes, because strangers choose it.
std::string request_line(const HttpRecord& record);

}  // namespace twell
