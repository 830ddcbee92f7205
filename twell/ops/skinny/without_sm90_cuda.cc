// SPDX-License-Identifier: Apache-2.0
// In place of batch_ops_sm90.cu in portable builds (TWELL_PORTABLE).
#include "twell/base/no_hopper.h"
#include "twell/ops/skinny/batch_ops.h"

namespace twell::batch_ops {

cudaError_t launch_linear(const Linear&, cudaStream_t) { no_hopper_kernel("batch op"); }
cudaError_t launch_down(const Down&, cudaStream_t) { no_hopper_kernel("batch op"); }
bool takes(const Qkv&) { return false; }
cudaError_t launch_qkv(const Qkv&, cudaStream_t) { no_hopper_kernel("batch op"); }
cudaError_t launch_gate_up(const GateUp&, cudaStream_t) { no_hopper_kernel("batch op"); }

}  // namespace twell::batch_ops
