// SPDX-License-Identifier: Apache-2.0
// In place of the room's *_sm90.cu in portable builds (TWELL_PORTABLE): no device takes all layers
// as one kernel.
#include "twell/base/no_hopper.h"
#include "twell/ops/decode/decode_layers.h"

namespace twell {

int64_t decode_workspace_bytes(const DecodeWorkspaceShape&) { return 0; }
DecodeWorkspace decode_workspace(const DecodeWorkspaceShape&, void*) { return {}; }
int64_t decode_layers_max_tokens(int64_t, int64_t, int64_t, int64_t, bool) { return 0; }
bool decode_layers_take_screens(int64_t, int64_t, int64_t, int64_t) { return false; }
cudaError_t launch_decode_layers_sm90(const DecodeLayers&, cudaStream_t) {
  no_hopper_kernel("all layers as one kernel");
}

}  // namespace twell
