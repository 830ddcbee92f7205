// SPDX-License-Identifier: Apache-2.0
// Kernels on the parameters of a model in training. Internal to train. Device memory throughout.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace twell {

// to[i] = from[i] rounded to nearest, i < n.
cudaError_t launch_round_weights(const float* from, int64_t n, __nv_bfloat16* to,
                                 cudaStream_t stream);

// For each neuron j with active[j] == 0: w[j] <- (1 - strength) w[j] + strength N(0, std_dev^2),
// in f32 and its bf16 copy. Element d of neuron j draws number first_index + j * width + d of the
// stream (rng.h), to within the last bit of the device's logarithm and cosine.
struct ReinitDead {
  int64_t neurons = 0;                        // F
  int64_t width = 0;                          // D
  const uint8_t* active = nullptr;            // [F]
  const float* skip_unless_finite = nullptr;  // one: where it is NaN nothing is changed
  float strength = 0.0f;
  float std_dev = 0.0f;
  uint64_t seed = 0;
  uint64_t stream = 0;
  uint64_t first_index = 0;
  float* weight = nullptr;               // [F, D]
  __nv_bfloat16* weight_bf16 = nullptr;  // [F, D]
};
cudaError_t launch_reinit_dead(const ReinitDead& problem, cudaStream_t stream);

}  // namespace twell
