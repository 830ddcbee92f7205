// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/ffn_call_cuda.h"

namespace twell {

// Decode rows and small batches, which take their token numbers from the problem.
void launch_few_tokens(const FfnCallCuda& call) {
  few_token_ffn_cuda(call.ctx, batch_ffn(call), call.buffers.few_tokens);
}

void launch_row_stream(const FfnCallCuda& call) {
  row_stream_ffn_cuda(call.ctx, batch_ffn(call), call.buffers.few_tokens);
}

void launch_portable_rows(const FfnCallCuda& call) {
  portable_rows_ffn_cuda(call.ctx, batch_ffn(call), call.buffers.few_tokens);
}

}  // namespace twell
