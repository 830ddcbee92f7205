// SPDX-License-Identifier: Apache-2.0
// The kernel of all layers with weights and a cache in bf16 ("wide") or in 8 bits: a source file
// for each, which the compiler takes a while for.
#pragma once

#include <cuda_runtime.h>

#include "twell/ops/decode/decode_layers.h"

namespace twell::decode {

// one: the kernel for one token. Weights, then the cache.
using Launch = cudaError_t(const DecodeLayers& problem, int multiprocessors, bool one, bool screens,
                           cudaStream_t stream);
Launch launch_wide_wide, launch_wide_bytes, launch_bytes_wide, launch_bytes_bytes;

}  // namespace twell::decode
