// SPDX-License-Identifier: Apache-2.0
// What the two executions of the feed-forward layer in training share inside this room: their entry
// points, and the elementwise arithmetic on pairs of neighbouring neurons in bf16, so that they
// round alike.
#pragma once

#include <cstdint>

#include "twell/base/carver.h"
#include "twell/base/reduce.cuh"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/ops/ffn_train/ffn_train_cuda.h"

namespace twell::ffn_train {

// Arrays of a block of device memory, aligned as cudaMalloc aligns.
inline Carver device_carver(std::byte* block = nullptr) { return {block, 256}; }

// Sizes in bytes.
int64_t dense_saved_bytes(const FfnTrainShapeCuda& shape);
int64_t dense_workspace_bytes(const FfnTrainShapeCuda& shape);
int64_t hybrid_saved_bytes(const FfnTrainShapeCuda& shape, HybridCapacityCuda capacity);
int64_t hybrid_workspace_bytes(const FfnTrainShapeCuda& shape);

// What to make room for: what nnz per token and union_neurons per tile of tokens (negative: not
// known) let expect, as far as the size of the dense execution's memory allows.
HybridCapacityCuda hybrid_capacity(const FfnTrainShapeCuda& shape, double nnz,
                                   double union_neurons);

void dense_forward_cuda(CudaContext& ctx, const FfnTrainForwardCuda& problem, FfnSavedCuda& saved,
                        FfnTrainWorkspaceCuda& workspace);
void dense_backward_cuda(CudaContext& ctx, const FfnTrainBackwardCuda& problem, FfnSavedCuda& saved,
                         FfnTrainWorkspaceCuda& workspace);
void hybrid_forward_cuda(CudaContext& ctx, const FfnTrainForwardCuda& problem, FfnSavedCuda& saved,
                         FfnTrainWorkspaceCuda& workspace);
void hybrid_backward_cuda(CudaContext& ctx, const FfnTrainBackwardCuda& problem,
                          FfnSavedCuda& saved, FfnTrainWorkspaceCuda& workspace);

using gpu::bf16x2;
using gpu::high_half;
using gpu::low_half;

// Bits 0 and 1: whether the first and the second of a pair are active. NaN counts as active.
__device__ __forceinline__ uint32_t fired_bits(uint32_t g) {
  return static_cast<uint32_t>((g & 0x7fff) != 0) | static_cast<uint32_t>((g & 0x7fff0000) != 0)
                                                        << 1;
}
__device__ __forceinline__ uint32_t fired_bits(const uint4& g) {
  return fired_bits(g.x) | fired_bits(g.y) << 2 | fired_bits(g.z) << 4 | fired_bits(g.w) << 6;
}

// f(g) for the output g of ReLU: g, or g^2 for relu2.
__device__ __forceinline__ float activated(float g, bool squared) { return squared ? g * g : g; }

// h = f(g) * u; adds |h| to l1.
__device__ __forceinline__ uint32_t hidden_pair(uint32_t g, uint32_t u, bool squared, float& l1) {
  const uint32_t fired = fired_bits(g);
  const float h0 = (fired & 1) != 0 ? activated(low_half(g), squared) * low_half(u) : 0.0f;
  const float h1 = (fired & 2) != 0 ? activated(high_half(g), squared) * high_half(u) : 0.0f;
  l1 += fabsf(h0);
  l1 += fabsf(h1);
  return bf16x2(h0, h1);
}

__device__ __forceinline__ float with_l1(float d_h, float h, float l1_scale) {
  return d_h + (h > 0.0f ? l1_scale : (h < 0.0f ? -l1_scale : 0.0f));
}

// max(0, u) of eight values; NaN stays.
__device__ __forceinline__ uint4 relu_of(const uint4& u) {
  const auto pair = [](uint32_t word) { return gpu::relu_bf16x2(low_half(word), high_half(word)); };
  return {pair(u.x), pair(u.y), pair(u.z), pair(u.w)};
}

// g becomes the gradient before the activation, u becomes d_u and d_h becomes h, all 0 where
// the neuron is not active. Under dReLU u is 0 where its ReLU is, and so is d_u.
__device__ __forceinline__ void backward_pair(uint32_t& d_h, uint32_t& g, uint32_t& u, bool squared,
                                              bool up_relu, float l1_scale) {
  const uint32_t fired = fired_bits(g);
  const bool first = (fired & 1) != 0, second = (fired & 2) != 0;
  const float g0 = low_half(g), g1 = high_half(g), u0 = low_half(u), u1 = high_half(u);
  const float f0 = activated(g0, squared), f1 = activated(g1, squared);
  const float h0 = first ? f0 * u0 : 0.0f, h1 = second ? f1 * u1 : 0.0f;
  const float d0 = with_l1(low_half(d_h), h0, l1_scale), d1 = with_l1(high_half(d_h), h1, l1_scale);
  float slope0 = u0, slope1 = u1;
  if (squared) {
    slope0 *= 2.0f * g0;
    slope1 *= 2.0f * g1;
  }
  g = bf16x2(first ? d0 * slope0 : 0.0f, second ? d1 * slope1 : 0.0f);
  const bool first_up = first && !(up_relu && u0 == 0.0f);
  const bool second_up = second && !(up_relu && u1 == 0.0f);
  u = bf16x2(first_up ? d0 * f0 : 0.0f, second_up ? d1 * f1 : 0.0f);
  d_h = bf16x2(h0, h1);
}
__device__ __forceinline__ void backward_eight(uint4& d_h, uint4& g, uint4& u, bool squared,
                                               bool up_relu, float l1_scale) {
  backward_pair(d_h.x, g.x, u.x, squared, up_relu, l1_scale);
  backward_pair(d_h.y, g.y, u.y, squared, up_relu, l1_scale);
  backward_pair(d_h.z, g.z, u.z, squared, up_relu, l1_scale);
  backward_pair(d_h.w, g.w, u.w, squared, up_relu, l1_scale);
}

// A pair of ones in bf16: u of a layer without a gate.
inline constexpr uint32_t kOnes = 0x3f803f80u;

// The sum over a CTA of Threads threads, on thread 0, in a fixed order.
template <int Threads>
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double of_warp[Threads / 32];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0.0;
  if (threadIdx.x == 0) {
    for (const double part : of_warp) sum += part;
  }
  __syncthreads();
  return sum;
}

}  // namespace twell::ffn_train
