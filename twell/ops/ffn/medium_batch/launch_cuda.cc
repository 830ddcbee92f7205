// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/ffn_call_cuda.h"
#include "twell/ops/ffn/medium_batch/medium_batch_cuda.h"

namespace twell {

// Works in memory of the gate GEMM and of tile-union, which this call does not run.
void launch_medium_batch(const FfnCallCuda& call) {
  FfnBuffersCuda& buffers = call.buffers;
  const TileUnionWorkspace& free = buffers.tile_union;
  medium_batch_ffn_cuda(
      call.ctx, batch_ffn(call),
      MediumBatchWorkspace::in(call.problem.tokens, call.ffn(), buffers.gate.data(), free.values(),
                               free.words(), free.word_count()));
}

}  // namespace twell
