// SPDX-License-Identifier: Apache-2.0
// Kernels that update the parameters of a model in training. Internal to train. All pointers refer
// to device memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/ops/adamw/adamw_cuda.h"

namespace twell {

// Splits f32 weights [n] into halves (split_weight.h; rest null: the upper halves alone), and joins
// halves to f32 weights.
cudaError_t launch_split_weights(const float* from, int64_t n, __nv_bfloat16* upper, int16_t* rest,
                                 cudaStream_t stream);
cudaError_t launch_join_weights(const __nv_bfloat16* upper, const int16_t* rest, int64_t n,
                                float* to, cudaStream_t stream);

// For each neuron j with active[j] == 0: w[j] <- (1 - strength) w[j] + strength N(0, std_dev^2), in
// f32, on weights in halves. Element d of neuron j uses random number first_index + j * width + d
// of the stream (rng.h), up to the last bit of the device's logarithm and cosine.
struct ReinitDead {
  int64_t neurons = 0;                        // F
  int64_t width = 0;                          // D
  const uint8_t* active = nullptr;            // [F]
  const float* skip_unless_finite = nullptr;  // one value; otherwise nothing changes
  float strength = 0.0f;
  float std_dev = 0.0f;
  uint64_t seed = 0;
  uint64_t stream = 0;
  uint64_t first_index = 0;
  __nv_bfloat16* weight = nullptr;  // [F, D] upper halves
  int16_t* weight_rest = nullptr;   // lower halves of elements [begin, end) of [F, D] row-major
  int64_t begin = 0;                // only these elements change
  int64_t end = 0;
};
cudaError_t launch_reinit_dead(const ReinitDead& problem, cudaStream_t stream);

// Between ranks. *squares = sum over i of norms[i].norm^2, of the pieces of one rank; *result = the
// norm of the squares [ranks] of all and its clipping factor (adamw_cuda.h). Sums are in order.
cudaError_t launch_sum_squares(const GradientNorm* norms, int64_t count, double* squares,
                               cudaStream_t stream);
cudaError_t launch_norm_of_ranks(const double* squares, int64_t ranks, double clip_norm,
                                 GradientNorm* result, cudaStream_t stream);

// to[i] = from[i], rounded to nearest.
cudaError_t launch_round_gradients(const float* from, int64_t n, __nv_bfloat16* to,
                                   cudaStream_t stream);
// sum[i] = the sum over ranks, in order, of parts[rank][i]; own rank's part is what sum[i] held.
cudaError_t launch_add_parts(const __nv_bfloat16* parts, int64_t ranks, int64_t own, int64_t n,
                             float* sum, cudaStream_t stream);

}  // namespace twell
