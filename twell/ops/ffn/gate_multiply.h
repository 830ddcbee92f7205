// SPDX-License-Identifier: Apache-2.0
// The one elementwise step of a dense gated layer on the GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace twell {

// u = g * u, n bf16 values, a multiple of 8, both 16-byte aligned.
cudaError_t launch_gate_multiply(__nv_bfloat16* u, const __nv_bfloat16* g, int64_t n,
                                 cudaStream_t stream);

}  // namespace twell
