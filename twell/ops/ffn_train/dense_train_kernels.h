// SPDX-License-Identifier: Apache-2.0
// The elementwise steps of the dense execution of the feed-forward layer in training on the GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/ops/ffn_train/ffn_train_counts_cuda.h"

namespace twell::ffn_train {

// Sums of doubles over CTAs in a fixed order: each writes its part, the last one adds them up.
struct OrderedSum {
  double* parts;     // [CTAs]
  uint32_t* ticket;  // 0 before and after
};
inline constexpr int64_t kHiddenRows = 8;  // of a CTA
inline int64_t hidden_ctas(int64_t tokens) { return (tokens + kHiddenRows - 1) / kHiddenRows; }
inline constexpr int64_t kUnionTokens = 128;
// Words of a mask of the neurons that are active in tiles of kUnionTokens tokens.
inline int64_t union_mask_words(int64_t tokens, int64_t ffn) {
  return (tokens + kUnionTokens - 1) / kUnionTokens * ((ffn + 31) / 32);
}

// h = g * u, and what the layer does is counted. Without a gate only the latter, u and h being null
// and g the hidden activations.
struct HiddenForward {
  const __nv_bfloat16* g = nullptr;      // [M, F], 0 where a neuron does not fire
  const __nv_bfloat16* u = nullptr;      // [M, F]
  __nv_bfloat16* h = nullptr;            // [M, F]
  int64_t tokens = 0;                    // M
  int64_t ffn = 0;                       // F, a multiple of 8
  FfnTrainCountsCuda* counts = nullptr;  // added to, or null
  uint8_t* active = nullptr;             // [F], or null
  uint32_t* union_mask = nullptr;        // [union_mask_words(M, F)] 0 at the start
  OrderedSum sum;                        // [hidden_ctas(M)]
};
cudaError_t launch_hidden_forward(const HiddenForward& problem, cudaStream_t stream);

// With d_h + l1_scale * sign(h) for d_h:  g becomes d_g = d_h * u, u becomes d_u = d_h * g, both
// zero where the neuron did not fire, and d_h becomes h. Without a gate (u null) g is left alone
// and d_h becomes its own masked sum.
struct HiddenBackward {
  __nv_bfloat16* d_h = nullptr;     // [M, F]
  __nv_bfloat16* g = nullptr;       // [M, F]
  __nv_bfloat16* u = nullptr;       // [M, F]
  int64_t size = 0;                 // M F, a multiple of 8
  const float* l1_scale = nullptr;  // one, in device memory
};
cudaError_t launch_hidden_backward(const HiddenBackward& problem, cudaStream_t stream);

}  // namespace twell::ffn_train
