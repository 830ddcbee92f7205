// SPDX-License-Identifier: Apache-2.0
// What the CUDA side of `twell doctor` reports; built with or without a CUDA toolkit.
#pragma once

#include <nlohmann/json.hpp>

namespace twell::cli {

// {"status": text, "devices": [{"name", "compute_capability", "memory_gib"}]}
nlohmann::json cuda_report();

}  // namespace twell::cli
