// SPDX-License-Identifier: Apache-2.0
// The weights of a feed-forward layer on the GPU.
#pragma once

#include <cuda_bf16.h>

#include "twell/format/activation.h"
#include "twell/format/byte_matrix_cuda.h"
#include "twell/ops/ffn/screened/rotated_screen.h"

namespace twell {

// Device memory, row-major.
struct FfnWeightsCuda {
  const __nv_bfloat16* w_gate = nullptr;  // [F, D], null when the layer is not gated
  const __nv_bfloat16* w_up = nullptr;    // [F, D]
  const __nv_bfloat16* w_down = nullptr;  // [F, D]
  Activation activation = Activation::kRelu;
  const __nv_bfloat16* b_gate = nullptr;  // [F], null when the layer is not gated
  const __nv_bfloat16* b_up = nullptr;    // [F]
  const __nv_bfloat16* b_down = nullptr;  // [D]; all three are null in a layer without biases
  RotatedGateCuda screen;                 // of w_gate; no values: none
  float threshold = 0.0f;                 // of fatrelu
  // In place of the matrices above: e4m3 with a scale per output (bytes/byte_ffn_cuda.h).
  ByteRowsCuda gate_bytes;  // [F, D], empty when the layer is not gated
  ByteRowsCuda up_bytes;    // [F, D]
  ByteRowsCuda down_bytes;  // [D, F]
  // [F, D] the values of down_bytes with a row per neuron, or null: small batches and tile-union
  // transpose them in every call.
  const uint8_t* down_rows = nullptr;

  bool biased() const { return b_down != nullptr; }
};

}  // namespace twell
