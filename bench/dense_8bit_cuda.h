// SPDX-License-Identifier: Apache-2.0
// The dense feed-forward layer on the GPU with 8-bit products of cuBLASLt: the baselines fp8 and
// int8 of `twell bench ffn`. x and y are bf16 [M, D], weights bf16 [F, D] as in FfnWeightsCuda,
// D and F multiples of 16, relu or relu2, gated or not, no biases.
//   fp8   e4m3 x e4m3, f32 sums with cuBLASLt's fast accumulation, products in bf16
//   int8  s8 x s8, exact s32 sums and products
// Every row of x, of h and of a weight (a neuron; of w_down an output) has a scale of its own, the
// row's largest absolute value / 448 or / 127. Steps of a call:
//   q(x);  g = q(x) q(w_gate)^T;  u = q(x) q(w_up)^T;  q(h), h = f(g) * u or f(u);  y = q(h)
//   q(w_down)
// The kernel that makes q(h) computes the scales of g and u and the activation, so that their GEMMs
// need no epilogue. The weights are quantised once, outside of a call; q(w_down) is [D, F], because
// 8-bit GEMMs need both operands contiguous along the summed dimension.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "twell/base/cuda.h"
#include "twell/format/activation.h"
#include "twell/ops/ffn/ffn_cuda.h"

namespace twell {

enum class Dense8Bit { kFp8, kInt8 };
std::string_view dense_8bit_name(Dense8Bit kind);  // "dense-fp8", "dense-int8"

// A matrix [rows, cols] of e4m3 or s8 with a scale per row: element = value * scale.
struct Rows8BitCuda {
  Rows8BitCuda() = default;
  Rows8BitCuda(int64_t rows, int64_t cols) : values(rows * cols), scales(rows) {}

  DeviceBuffer<uint8_t> values;
  DeviceBuffer<float> scales;
};

struct FfnWeights8BitCuda {
  // Enqueues the quantisation of a layer's weights. `weights` has no biases.
  FfnWeights8BitCuda(CudaContext& ctx, Dense8Bit kind, const FfnWeightsCuda& weights, int64_t width,
                     int64_t ffn);

  Rows8BitCuda gate;  // [F, D], empty without a gate
  Rows8BitCuda up;    // [F, D]
  Rows8BitCuda down;  // [D, F]
};

class Gemm8BitCuda;

class DenseFfn8BitCuda {
 public:
  // For exactly `tokens` tokens; owns the activations in between.
  DenseFfn8BitCuda(CudaContext& ctx, Dense8Bit kind, int64_t tokens, int64_t width, int64_t ffn,
                   bool gated, Activation activation);
  ~DenseFfn8BitCuda();
  DenseFfn8BitCuda(const DenseFfn8BitCuda&) = delete;
  DenseFfn8BitCuda& operator=(const DenseFfn8BitCuda&) = delete;

  // Why this layer cannot run here: its sizes, its activation, the GPU, its free memory, or no
  // algorithm of cuBLASLt. Empty if it can; otherwise nothing else may be called.
  const std::string& unavailable() const { return unavailable_; }
  // The arithmetic in words, for result rows.
  std::string arithmetic() const;

  // Times every algorithm that cuBLASLt proposes on these operands, also for the tokens rounded up
  // to a multiple of 32, and keeps the fastest. Synchronises, and leaves y with a result.
  void tune(CudaContext& ctx, const FfnWeights8BitCuda& weights, const __nv_bfloat16* x,
            __nv_bfloat16* y);

  // y [M, D] = FFN(x [M, D]). Enqueues; never synchronises.
  void forward(CudaContext& ctx, const FfnWeights8BitCuda& weights, const __nv_bfloat16* x,
               __nv_bfloat16* y) const;
  // The two halves: q(x) and the first product; the rest.
  void gate(CudaContext& ctx, const FfnWeights8BitCuda& weights, const __nv_bfloat16* x) const;
  void up_down(CudaContext& ctx, const FfnWeights8BitCuda& weights, __nv_bfloat16* y) const;

 private:
  std::string find_obstacle(const CudaContext& ctx, Activation activation) const;
  void quantise_hidden(CudaContext& ctx, const FfnWeights8BitCuda& weights) const;
  void down(CudaContext& ctx, const FfnWeights8BitCuda& weights, __nv_bfloat16* y) const;

  Dense8Bit kind_;
  int64_t tokens_, width_, ffn_;
  bool gated_, squared_;
  std::string unavailable_;
  std::unique_ptr<Gemm8BitCuda> wide_gemm_;  // D to F
  // F to D: without scales, which are then applied in a pass over the products, or with them, where
  // cuBLASLt has that.
  std::unique_ptr<Gemm8BitCuda> down_gemm_, scaled_down_gemm_;
  bool scales_in_gemm_ = false;
  Rows8BitCuda x_, hidden_;
  // bf16 or s32, of as many rows as the GEMMs may write.
  DeviceBuffer<uint8_t> gate_products_, up_products_, down_products_;
};

}  // namespace twell
