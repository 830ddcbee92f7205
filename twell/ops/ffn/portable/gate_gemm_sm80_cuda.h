// SPDX-License-Identifier: Apache-2.0
// The gate GEMM of gate_gemm_cuda.h for GPUs that lack Hopper's instructions: same problem, same
// contract, on mma.sync, compute capability 8.0 or later. Non-zeros are stored in column order.
#pragma once

#include "twell/ops/ffn/gate_gemm_cuda.h"

namespace twell {

// Why the problem cannot run on this context's device; empty when it can.
std::string gate_gemm_sm80_unsupported(const CudaContext& ctx, const GateGemmCuda& problem);

// Throws Error where unsupported.
void gate_gemm_sm80_cuda(CudaContext& ctx, const GateGemmCuda& problem);

}  // namespace twell
