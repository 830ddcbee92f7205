// SPDX-License-Identifier: Apache-2.0
// Adds what a packed gate holds to a layer's counts, for executions that do not see all rows in one
// place.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "twell/format/activity_cuda.h"

namespace twell {

// row_nnz [tokens], device memory.
cudaError_t launch_count_rows(const int32_t* row_nnz, int64_t tokens, ActivityCuda* activity,
                              cudaStream_t stream);

}  // namespace twell
