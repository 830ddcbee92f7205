// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/decode/decode_launch_sm90.h"
#include "twell/ops/decode/decode_layers_sm90.cuh"

namespace twell::decode {

cudaError_t launch_bytes_bytes(const DecodeLayers& problem, int multiprocessors, bool one,
                               bool screens, cudaStream_t stream) {
  return launch_as<uint8_t, int8_t>(problem, multiprocessors, one, screens, stream);
}

}  // namespace twell::decode
