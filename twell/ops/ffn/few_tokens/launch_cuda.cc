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

// In e4m3, whose scales of w_down belong to its columns.
void launch_small_batch_bytes(const FfnCallCuda& call) {
  const FfnWeightsCuda& weights = call.problem.weights;
  BatchFfnCuda problem = batch_ffn(call);
  problem.x_bytes = call.problem.x_bytes;
  problem.gate_bytes = weights.gate_bytes;
  problem.up_bytes = weights.up_bytes;
  problem.down_bytes = {make_down_rows(call), weights.down_bytes.scales};
  few_token_ffn_cuda(call.ctx, problem, call.buffers.few_tokens);
}

void launch_portable_rows(const FfnCallCuda& call) {
  portable_rows_ffn_cuda(call.ctx, batch_ffn(call), call.buffers.few_tokens);
}

void launch_portable_batch(const FfnCallCuda& call) {
  portable_batch_ffn_cuda(call.ctx, batch_ffn(call), call.buffers.few_tokens);
}

}  // namespace twell
