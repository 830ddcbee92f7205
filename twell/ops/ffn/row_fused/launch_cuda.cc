// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/ffn_call_cuda.h"

namespace twell {

void launch_row_fused(const FfnCallCuda& call) {
  row_fused_up_down_cuda(call.ctx, packed_gate(call), call.buffers.row_fused);
}

}  // namespace twell
