// SPDX-License-Identifier: Apache-2.0
// Makes a screen on the device.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "twell/ops/decode/gate_screen.h"

namespace twell {

struct MakeGateScreen {
  int64_t neurons = 0;                    // F
  int64_t width = 0;                      // D, one that there are screens for
  const __nv_bfloat16* weight = nullptr;  // [F, D] row-major, 4-byte aligned
  const __nv_bfloat16* norm = nullptr;    // [D] weights of the norm that x comes from
  uint8_t* rows = nullptr;                // out, as in GateScreen
  float* errors = nullptr;                // out
};

cudaError_t launch_make_gate_screen(const MakeGateScreen& problem, cudaStream_t stream);

}  // namespace twell
