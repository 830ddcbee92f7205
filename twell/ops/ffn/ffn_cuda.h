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
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "twell/base/cuda.h"
#include "twell/format/activation.h"
#include "twell/format/activity_cuda.h"
#include "twell/ops/ffn/dispatch.h"
#include "twell/ops/ffn/few_tokens/batch_ffn_cuda.h"
#include "twell/ops/ffn/ffn.h"
#include "twell/ops/ffn/screened/rotated_screen.h"
#include "twell/ops/ffn/sparse_up_down_cuda.h"
#include "twell/ops/matmul/matmul_cuda.h"

namespace twell {

// Device memory, row-major.
struct FfnWeightsCuda {
  const __nv_bfloat16* w_gate = nullptr;  // [F, D], null when the layer is not gated
  const __nv_bfloat16* w_up = nullptr;    // [F, D]
  const __nv_bfloat16* w_down = nullptr;  // [F, D]
  Activation activation = Activation::kRelu;
  const __nv_bfloat16* b_gate = nullptr;  // [F], null when the layer is not gated
  const __nv_bfloat16* b_up = nullptr;    // [F]
  const __nv_bfloat16* b_down = nullptr;  // [D]; all three are null in a layer without biases
  RotatedGateCuda screen;                 // of w_gate; no values: none

  bool biased() const { return b_down != nullptr; }
};

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
  // A bias comes between the product and its activation.
  bool relu_in_epilogue() const { return leaves_zeros(activation_) && !biased_; }
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
// h = f(g) * u, or f(g) without u. f is computed in f32, see format/activation.h.
struct ActivateMultiply {
  Activation activation = Activation::kRelu;
  const __nv_bfloat16* g =
      nullptr;  // [M, F] before the activation, or after ReLU where f is ReLU or relu2
  const __nv_bfloat16* u = nullptr;  // [M, F], or null: no gate
  __nv_bfloat16* h = nullptr;        // [M, F] out; may be either input; null: only count
  int64_t tokens = 0;                // M
  int64_t ffn = 0;                   // F, a multiple of 8
  int32_t* row_nnz = nullptr;        // [M] out: active neurons, or null
  ActivityCuda* counts = nullptr;    // added to, or null
  int64_t stride = 1;                // only every stride-th token is processed
};
cudaError_t launch_activate_multiply(const ActivateMultiply& problem, cudaStream_t stream);

// One layer. The plan's counts are as of the last update.
struct FfnPlanCuda {
  FfnPlan plan;
  LayerActivity activity;
  ActivityCuda* counts = nullptr;  // device memory: counts since the last update
  int64_t screened_calls = 0;      // chunks of tokens behind a screen so far

  // The last choice and what it was made for, because most calls repeat the one before.
  struct Chosen {
    GpuFfnLayer layer;
    GpuFfnCall call;
    LayerActivity activity;
    GpuFfnChoice choice;
  };
  std::optional<Chosen> last;
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
  // Updates so far. The same calls have the same choices, captured or not, until it changes.
  int64_t revision() const { return revision_; }

 private:
  int64_t ffn_;
  int64_t revision_ = 0;
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
  int64_t tokens = 0;  // M, at most the workspace's
  // Rows that x and y have, if more than M. cuBLASLt's products take up to 127 of them along, so
  // that few sizes need plans; it does not matter what is in them.
  int64_t rows = 0;
  FfnWeightsCuda weights;            // of the workspace's shape
  const __nv_bfloat16* x = nullptr;  // [M, D]
  __nv_bfloat16* y = nullptr;        // [M, D], every element written; may not overlap x
  int32_t* row_nnz = nullptr;        // [M] out: active neurons of each token, or null
  // [D] weight of an RMS norm applied to x first, or null. Only where gpu_ffn_takes_norm; x may
  // then be y if `add`.
  const __nv_bfloat16* norm = nullptr;
  float eps = 1e-5f;  // of the norm
  bool add = false;   // y += instead of =
  // [M] row of y of each row of x, each once, where ffn_maps_rows; null: its own.
  const int32_t* y_rows = nullptr;
  // [M, D] x rotated with the bound of weights.screen, read where ffn_reads_rotated; no values: the
  // layer runs without its screen.
  RotatedRowsCuda rotated;
};

// Asks the table what a call of this layer runs under the plan's policy, and records it in the
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
