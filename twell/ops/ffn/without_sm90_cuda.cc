// SPDX-License-Identifier: Apache-2.0
// In place of the room's *_sm90.cu in portable builds (TWELL_PORTABLE), whose registry names none
// of their executions for any device.
#include "twell/base/cuda.h"
#include "twell/base/no_hopper.h"
#include "twell/ops/ffn/few_tokens/batch_ffn_cuda.h"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"
#include "twell/ops/ffn/medium_batch/medium_batch_cuda.h"
#include "twell/ops/ffn/screened/screened_ffn_cuda.h"
#include "twell/ops/ffn/tile_union/tile_union_kernels.h"

namespace twell {

GatePhases gate_gemm_phases(const CudaContext&, int64_t, int64_t) { no_hopper_kernel("gate GEMM"); }
void gate_gemm_cuda(CudaContext&, const GateGemmCuda&) { no_hopper_kernel("gate GEMM"); }
void few_token_ffn_cuda(CudaContext&, const BatchFfnCuda&, FewTokenWorkspace&) {
  no_hopper_kernel("few-token FFN");
}
void row_stream_ffn_cuda(CudaContext&, const BatchFfnCuda&, FewTokenWorkspace&) {
  no_hopper_kernel("row stream");
}
void medium_batch_ffn_cuda(CudaContext&, const BatchFfnCuda&, const MediumBatchWorkspace&) {
  no_hopper_kernel("medium batch");
}
void screen_gemm_cuda(CudaContext&, const ScreenGemmCuda&) { no_hopper_kernel("screen GEMM"); }
cudaError_t launch_check_screen(const TwellPacked&, const uint32_t*, ActivityCuda*, cudaStream_t) {
  no_hopper_kernel("screen GEMM");
}

namespace tile_union {

cudaError_t launch_up_sm90(const Up&, int, cudaStream_t) { no_hopper_kernel("tile-union"); }
cudaError_t launch_down_sm90(const Down&, int, cudaStream_t) { no_hopper_kernel("tile-union"); }
cudaError_t launch_byte_down_sm90(const Down&, int, cudaStream_t) {
  no_hopper_kernel("tile-union");
}

}  // namespace tile_union
}  // namespace twell
