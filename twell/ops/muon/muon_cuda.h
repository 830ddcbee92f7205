// SPDX-License-Identifier: Apache-2.0
// Muon on the GPU: the formula of muon.h, with the matrix of orthogonalise in bf16 and its sums in
// f32. The elementwise parts are the CPU's bit for bit. Whatever changes from step to step is read
// from device memory. Weights are f32 in two halves (split_weight.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "twell/base/cuda.h"
#include "twell/ops/muon/muon.h"

namespace twell {

// Device memory throughout. A clip_factor that is NaN skips what is written to.
struct MuonMomentumCuda {
  int64_t size = 0;
  const MuonCoefficients* coefficients = nullptr;
  const float* clip_factor = nullptr;  // on top of coefficients->grad_scale
  float* grad = nullptr;               // [N] in: gradients, out: updates u
  float* exp_avg = nullptr;            // [N]
};
cudaError_t launch_muon_momentum(const MuonMomentumCuda& problem, cudaStream_t stream);

struct MuonApplyCuda {
  int64_t size = 0;
  const MuonCoefficients* coefficients = nullptr;
  const float* clip_factor = nullptr;
  float shape_factor = 1.0f;
  const float* orthogonal = nullptr;  // [N]
  __nv_bfloat16* weight = nullptr;    // [N] upper halves
  int16_t* weight_rest = nullptr;     // [N] lower halves
};
cudaError_t launch_muon_apply(const MuonApplyCuda& problem, cudaStream_t stream);

// Enqueues orthogonalise of a matrix [rows, cols] in place. workspace: device memory of
// orthogonalise_bytes, aligned to 256 bytes. The first call of a shape plans matrix products, which
// allocates.
int64_t orthogonalise_bytes(int64_t rows, int64_t cols);
void orthogonalise_cuda(CudaContext& ctx, float* matrix, int64_t rows, int64_t cols,
                        std::byte* workspace);

}  // namespace twell
