// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/ffn_call_cuda.h"

namespace twell {

void launch_medium_batch(const FfnCallCuda& call) {
  medium_batch_ffn_cuda(call.ctx, batch_ffn(call), call.buffers.gate.data(),
                        call.buffers.tile_union);
}

}  // namespace twell
