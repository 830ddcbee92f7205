// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace twell::cli {

// Memory this process may use: the machine's, or the control group's limit.
int64_t memory_limit_bytes();

// InputError when a plan needs more than that, before anything is allocated.
void require_memory(int64_t planned_bytes);

// Gives memory that was freed, and is kept for later allocations, back to the system.
void return_freed_memory();

}  // namespace twell::cli
