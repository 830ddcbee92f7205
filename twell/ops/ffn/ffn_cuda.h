// SPDX-License-Identifier: Apache-2.0
// The feed-forward layer on the GPU at inference, bf16 with f32 accumulation, or e4m3: runs the
// execution that registry.h chooses. All give the dense result within accumulation order, on every
// input; in e4m3 the dense ones quantise h besides (bytes/byte_ffn_cuda.h).
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "twell/base/cuda.h"
#include "twell/ops/ffn/activity_cuda.h"
#include "twell/ops/ffn/ffn_call_cuda.h"
#include "twell/ops/ffn/registry.h"

namespace twell {

// The context's device, as the registry describes it.
GpuDevice gpu_device(const CudaContext& ctx);

// Device memory of one layer call in flight, shared by all layers of one shape on one stream.
class FfnWorkspaceCuda {
 public:
  // For calls of up to max_tokens tokens, which are worked on in chunks: memory does not grow with
  // max_tokens beyond chunk_tokens().
  FfnWorkspaceCuda(CudaContext& ctx, int64_t max_tokens, int64_t width, int64_t ffn, bool gated);

  int64_t max_tokens() const { return max_tokens_; }
  int64_t chunk_tokens() const { return chunk_tokens_; }  // worked on at once
  int64_t width() const { return buffers_.layer.width; }
  int64_t ffn() const { return buffers_.layer.ffn; }
  bool gated() const { return buffers_.layer.gated; }
  // The layer as the registry describes it, with ReLU.
  const GpuFfnLayer& layer() const { return buffers_.layer; }
  FfnBuffersCuda& buffers() { return buffers_; }
  // Allocates what calls with operands in e4m3 need besides, and how much that will be.
  void make_for_bytes();
  bool takes_bytes() const { return buffers_.w_down.size() > 0; }
  static int64_t bytes_for_bytes(const CudaContext& ctx, int64_t max_tokens, int64_t width,
                                 int64_t ffn, bool gated);
  int64_t bytes() const;
  // What bytes() will be, less up to 30 MiB of the executions that take little memory.
  static int64_t bytes_needed(const CudaContext& ctx, int64_t max_tokens, int64_t ffn);
  // What chunk_tokens() will be: up to 135,168 on an H200, half of that where the memory would
  // exceed 5 GiB, and less still for an F so large that it would exceed 16 GiB.
  static int64_t chunk_tokens(const CudaContext& ctx, int64_t max_tokens, int64_t ffn);

 private:
  int64_t max_tokens_, chunk_tokens_;
  FfnBuffersCuda buffers_;
};

// Asks the registry what a call of this layer runs under the plan's policy, and records it in the
// plan, where it stays until the next choice.
const GpuFfnChoice& choose_ffn_cuda(const GpuFfnLayer& layer, const GpuFfnCall& call,
                                    FfnPlanCuda& plan);

// Whether ffn_forward_cuda will read problem.rotated, so that the norm in front should write it.
// The values of x and of `rotated` are not read here.
bool ffn_reads_rotated(const FfnForwardCuda& problem, FfnPlanCuda& plan,
                       const FfnWorkspaceCuda& workspace);

// Whether ffn_forward_cuda takes rows of x in another order than those of y. These executions are
// faster the more alike the neurons are that 128 neighbouring rows activate.
bool ffn_maps_rows(const FfnForwardCuda& problem, FfnPlanCuda& plan,
                   const FfnWorkspaceCuda& workspace);

// Never synchronises. The first dense call with a number of rows makes its cuBLASLt plans.
void ffn_forward_cuda(CudaContext& ctx, const FfnForwardCuda& problem, FfnPlanCuda& plan,
                      FfnWorkspaceCuda& workspace);

}  // namespace twell
