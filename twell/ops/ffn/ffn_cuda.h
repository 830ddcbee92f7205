// SPDX-License-Identifier: Apache-2.0
// The feed-forward layer on the GPU at inference, bf16 with f32 accumulation: runs the execution
// that dispatch.h chooses. All give the dense result within accumulation order, on every input.
//
// The choice follows the layer's measured activity. Kernels count on the device;
// FfnPlansCuda::update() fetches the counts, at a point where the caller waits for the device
// anyway. Between updates the choice depends on the call alone, so runs repeat, and calls can be
// captured in a CUDA graph (which keeps the choice made at capture).
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "twell/base/cuda.h"
#include "twell/format/activity_cuda.h"
#include "twell/ops/ffn/dense_ffn_cuda.h"
#include "twell/ops/ffn/dispatch.h"
#include "twell/ops/ffn/ffn.h"
#include "twell/ops/ffn/hopper/few_token_ffn_cuda.h"
#include "twell/ops/ffn/sparse_up_down_cuda.h"

namespace twell {

// One layer. The plan's counts are as of the last update.
struct FfnPlanCuda {
  FfnPlan plan;
  LayerActivity activity;
  ActivityCuda* counts = nullptr;  // device memory: counts since the last update
};

// The context's device, as dispatch.h describes it.
GpuDevice gpu_device(const CudaContext& ctx);

// Averages of the counts; `before` where nothing was counted.
LayerActivity layer_activity(const ActivityCuda& counts, int64_t ffn, LayerActivity before = {});

// The plans of a model's layers, whose counts are fetched together.
class FfnPlansCuda {
 public:
  // ffn: F of every layer.
  FfnPlansCuda(CudaContext& ctx, int64_t layers, int64_t ffn, FfnPolicy policy);

  FfnPlanCuda& operator[](int64_t layer) { return plans_[static_cast<size_t>(layer)]; }
  const FfnPlanCuda& operator[](int64_t layer) const { return plans_[static_cast<size_t>(layer)]; }
  int64_t size() const { return static_cast<int64_t>(plans_.size()); }

  // Waits for the stream and adds the layers' counts since the last call to their plans.
  void update(CudaContext& ctx);

 private:
  int64_t ffn_;
  DeviceBuffer<ActivityCuda> counts_;  // [L]
  std::vector<FfnPlanCuda> plans_;     // [L]
};

// Device memory of one layer call in flight, shared by all layers of one shape on one stream.
class FfnWorkspaceCuda {
 public:
  // For calls of up to max_tokens tokens, which are worked on in chunks: memory does not grow with
  // max_tokens beyond chunk_tokens().
  FfnWorkspaceCuda(CudaContext& ctx, int64_t max_tokens, int64_t width, int64_t ffn, bool gated);
  ~FfnWorkspaceCuda();

  int64_t max_tokens() const { return max_tokens_; }
  int64_t chunk_tokens() const { return chunk_tokens_; }  // worked on at once
  int64_t width() const { return layer_.width; }
  int64_t ffn() const { return layer_.ffn; }
  bool gated() const { return layer_.gated; }
  // The layer as dispatch.h describes it, with ReLU.
  const GpuFfnLayer& layer() const { return layer_; }
  int64_t bytes() const;
  // What bytes() will be, less a few MiB of the executions that take little memory.
  static int64_t bytes_needed(const CudaContext& ctx, int64_t max_tokens, int64_t ffn);
  // What chunk_tokens() will be: up to 135,168 on an H200, half of that where the memory would
  // exceed 5 GiB, and less still for an F so large that it would exceed 16 GiB.
  static int64_t chunk_tokens(const CudaContext& ctx, int64_t max_tokens, int64_t ffn);

 private:
  friend class FfnCallCuda;
  int64_t max_tokens_, chunk_tokens_;
  GpuFfnLayer layer_;
  DeviceBuffer<uint32_t> words_;      // TwELL words of a chunk
  DeviceBuffer<__nv_bfloat16> gate_;  // its spill slots, or the dense gate [chunk, F]
  DeviceBuffer<int32_t> row_nnz_;     // [chunk]
  TileUnionWorkspace tile_union_;     // its values double as the dense hidden [chunk, F]
  RowFusedWorkspace row_fused_;
  FewTokenWorkspace few_tokens_;
  // By number of tokens, activation, whether y is added to, and whether there are biases.
  std::map<std::tuple<int64_t, Activation, bool, bool>, std::unique_ptr<DenseFfnCuda>> dense_;
};

struct FfnForwardCuda {
  int64_t tokens = 0;                // M, at most the workspace's
  FfnWeightsCuda weights;            // of the workspace's shape
  const __nv_bfloat16* x = nullptr;  // [M, D]
  __nv_bfloat16* y = nullptr;        // [M, D], every element written; may not overlap x
  int32_t* row_nnz = nullptr;        // [M] out: active neurons of each token, or null
  // [D] weight of an RMS norm applied to x first, or null. Only where gpu_ffn_takes_norm; x may
  // then be y if `add`.
  const __nv_bfloat16* norm = nullptr;
  float eps = 1e-5f;  // of the norm
  bool add = false;   // y += instead of =
};

// Asks the table what a call of this layer runs under the plan's policy, and records it in the
// plan.
GpuFfnChoice choose_ffn_cuda(const GpuFfnLayer& layer, const GpuFfnCall& call, FfnPlanCuda& plan);

// Never synchronises. The first dense call with a number of tokens makes its cuBLASLt plans.
void ffn_forward_cuda(CudaContext& ctx, const FfnForwardCuda& problem, FfnPlanCuda& plan,
                      FfnWorkspaceCuda& workspace);

}  // namespace twell
