// SPDX-License-Identifier: Apache-2.0
// The dense feed-forward layer on the GPU through cuBLASLt, bf16 with f32 accumulation.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <memory>

#include "twell/base/cuda.h"
#include "twell/format/activation.h"
#include "twell/format/activity_cuda.h"
#include "twell/ops/ffn/ffn_weights_cuda.h"
#include "twell/ops/matmul/matmul_cuda.h"

namespace twell {

// Optional counts of a dense call.
struct DenseCountsCuda {
  int64_t tokens = 0;                // rows, from the first on, whose result is wanted; 0: all
  int32_t* row_nnz = nullptr;        // [M] out: active neurons of each token
  ActivityCuda* activity = nullptr;  // added to; non-gated ReLU layers count every 16th token
};

// The dense feed-forward layer on the GPU, bf16, through cuBLASLt: the baseline of the sparse
// executions, and what a layer without sparsity runs.
//   gated:      g = relu(x w_gate^T) in the GEMM's epilogue, u = x w_up^T, u = g * u, y = u w_down
//   non-gated:  h = relu(x w_up^T), y = h w_down
// The square of relu2, or another activation, is computed in f32 together with the product. Biases,
// where a layer has them, are added to g, u and y after their GEMMs. The result can be added to y.
class DenseFfnCuda {
 public:
  // For exactly `tokens` tokens; owns the activations in between, 2 M F values, or M F in a
  // non-gated ReLU layer.
  DenseFfnCuda(CudaContext& ctx, int64_t tokens, int64_t width, int64_t ffn, bool gated,
               Activation activation = Activation::kRelu, bool add = false);
  // The same in the caller's memory: gate [M, F] (not needed in a non-gated ReLU layer) and hidden
  // [M, F].
  DenseFfnCuda(CudaContext& ctx, int64_t tokens, int64_t width, int64_t ffn, bool gated,
               __nv_bfloat16* gate, __nv_bfloat16* hidden,
               Activation activation = Activation::kRelu, bool add = false, bool biased = false);

  // Times cuBLASLt's candidate algorithms on these operands and keeps the fastest. Synchronises,
  // and leaves y as MatmulPlanCuda::tune does.
  void tune(CudaContext& ctx, const FfnWeightsCuda& weights, const __nv_bfloat16* x,
            __nv_bfloat16* y);

  // y [M, D] = FFN(x [M, D]), or +=, with the activation and the biases it was made for. Never
  // synchronises.
  void forward(CudaContext& ctx, const FfnWeightsCuda& weights, const __nv_bfloat16* x,
               __nv_bfloat16* y, const DenseCountsCuda& counts = {}) const;
  // The two halves: the first product (in ReLU and relu2 layers with its ReLU), and the rest.
  void gate(CudaContext& ctx, const FfnWeightsCuda& weights, const __nv_bfloat16* x) const;
  void up_down(CudaContext& ctx, const FfnWeightsCuda& weights, const __nv_bfloat16* x,
               __nv_bfloat16* y, const DenseCountsCuda& counts = {}) const;
  __nv_bfloat16* gate_values() const { return in_place() ? hidden_ : gate_; }  // [M, F]

 private:
  // A bias comes between the product and its activation, and the epilogue has no threshold.
  bool relu_in_epilogue() const {
    return leaves_zeros(activation_) && activation_ != Activation::kFatRelu && !biased_;
  }
  // The first product is h.
  bool in_place() const { return !gated_ && activation_ == Activation::kRelu && !biased_; }
  void add_bias(CudaContext& ctx, const __nv_bfloat16* bias, int64_t width, __nv_bfloat16* x) const;

  int64_t tokens_;
  int64_t ffn_;
  int64_t width_;
  bool gated_;
  bool biased_;
  Activation activation_;
  std::unique_ptr<MatmulPlanCuda> gate_plan_, up_plan_, down_plan_;
  DeviceBuffer<__nv_bfloat16> owned_;  // gate and hidden, or nothing
  __nv_bfloat16* gate_ = nullptr;      // [M, F]
  __nv_bfloat16* hidden_ = nullptr;    // [M, F]
};

// The elementwise step between the products of a dense layer, which also counts active neurons:
// h = f(g) * u, or f(g) without u; max(u, 0) stands for u in dReLU layers. f is computed in f32,
// see format/activation.h.
struct ActivateMultiply {
  Activation activation = Activation::kRelu;
  const __nv_bfloat16* g =
      nullptr;  // [M, F] before the activation, or after a ReLU where f leaves zeros
  const __nv_bfloat16* u = nullptr;  // [M, F], or null: no gate
  __nv_bfloat16* h = nullptr;        // [M, F] out; may be either input; null: only count
  int64_t tokens = 0;                // M
  int64_t ffn = 0;                   // F, a multiple of 8
  int32_t* row_nnz = nullptr;        // [M] out: active neurons, or null
  ActivityCuda* counts = nullptr;    // added to, or null
  int64_t stride = 1;                // only every stride-th token is processed
  float threshold = 0.0f;            // of fatrelu
};
cudaError_t launch_activate_multiply(const ActivateMultiply& problem, cudaStream_t stream);

}  // namespace twell
