// SPDX-License-Identifier: Apache-2.0
// In place of qkv_sm90.cu in portable builds (TWELL_PORTABLE), where separate steps run.
#include "twell/base/no_hopper.h"
#include "twell/ops/qkv/qkv_cuda.h"

namespace twell {

bool qkv_is_fused(const CudaContext&, const QkvCuda&) { return false; }
void qkv_cuda(CudaContext&, const QkvCuda&) { no_hopper_kernel("fused projection"); }

}  // namespace twell
