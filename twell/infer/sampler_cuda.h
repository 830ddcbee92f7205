// SPDX-License-Identifier: Apache-2.0
// The sampler (sampler.h) on the GPU: draws the next token for every row of logits, with the same
// filters, tie order and random numbers. Probabilities are summed as 32-bit fixed-point numbers, so
// that draws are reproducible; they differ from the CPU's only where a sum is within rounding of a
// boundary.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace twell {

struct SampleCuda {
  int64_t rows = 0;
  int64_t vocab = 0;                // logits used in each row, from its start
  int64_t stride = 0;               // from one row to the next
  const float* logits = nullptr;    // [rows, stride]
  const float* uniforms = nullptr;  // [rows] in [0, 1): uniform(seed, stream, index) of each row
  int32_t* ids = nullptr;           // [rows] out; -1 where a logit is NaN or none is finite
  // As in SamplerOptions.
  float temperature = 1.0f;
  int64_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
};
cudaError_t launch_sample(const SampleCuda& problem, cudaStream_t stream);

}  // namespace twell
