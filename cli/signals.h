// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>

namespace twell::cli {

// From the first call on, SIGINT and SIGTERM set the returned flag instead of ending the process;
// a second signal ends it at once with exit code 130.
const std::atomic<bool>& stop_on_signals();

}  // namespace twell::cli
