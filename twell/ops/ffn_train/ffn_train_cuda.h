// SPDX-License-Identifier: Apache-2.0
// The feed-forward layer in training on the GPU, the op of ffn_train.h in bf16 with f32
// accumulation (weight gradients are f32).
//   dense   cuBLASLt GEMMs; keeps the activation's input, or g where the GEMM applies the ReLU, and
//   u
//           [M, F]. Takes every activation, blends with ReLU, biases and any F
//   hybrid  gate GEMM -> TwELL. All later work, backward included, is on active neurons only, and
//           only they are kept for backward. Tiles of 128 tokens gather the weight rows of their
//           active neurons; for weight gradients, tiles of 128 neurons gather their tokens. From
//           compute capability 8.0 on, activations that leave zeros, no biases, F a multiple of 8;
//           16,384 tokens at a time
// Both give the same result within accumulation order, on every input. The caller picks the
// execution from the counts of earlier steps (choose_gpu_ffn_train). Calls never synchronise,
// repeat bit for bit, and can be captured in a CUDA graph. Throws Error where sizes do not match.
// All matrices are contiguous, row-major, in device memory.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "twell/base/cuda.h"
#include "twell/format/twell.h"
#include "twell/ops/ffn/ffn_cuda.h"
#include "twell/ops/ffn_train/ffn_train.h"

namespace twell {

struct FfnTrainGradsCuda {
  float* w_gate = nullptr;  // [F, D] accumulated, null when not gated
  float* w_up = nullptr;    // [F, D] accumulated
  float* w_down = nullptr;  // [F, D] accumulated
  bool add = true;          // false: they are overwritten
  // [F], [F], [D] accumulated whatever `add` says; null where the layer has no gate or no biases.
  // Like the biases themselves, those of F neurons have F rounded up to a multiple of 8 places.
  float *b_gate = nullptr, *b_up = nullptr, *b_down = nullptr;
};

struct FfnTrainShapeCuda {
  int64_t max_tokens = 0;  // of a call
  int64_t width = 0;       // D
  int64_t ffn = 0;         // F
  bool gated = true;
  bool biased = false;
  // What hybrid calls have; dense ones take any.
  Activation activation = Activation::kRelu;
  // hybrid runs on its kernels for every GPU of compute capability 8.0 and later, on Hopper too.
  bool portable = false;
};

// What the hybrid execution has room to keep of one chunk of tokens.
struct HybridCapacityCuda {
  int64_t pairs = 0;   // active (token, neuron) pairs
  int64_t blocks = 0;  // of 64 neurons of tiles' unions
};

// What one layer keeps from forward to backward, in memory for the execution that was prepared. The
// hybrid one never takes more than the dense one.
struct FfnSavedCuda {
  FfnSavedCuda(CudaContext& ctx, const FfnTrainShapeCuda& shape);
  // For one execution, in bytes_needed() bytes of the caller's device memory, aligned to 256.
  // saved_tokens: of the forward that filled this memory, or 0.
  FfnSavedCuda(CudaContext& ctx, const FfnTrainShapeCuda& shape, FfnTrainExecution execution,
               double nnz, double union_neurons, std::byte* memory, int64_t saved_tokens);
  // Between steps, where the memory is its own: allocates memory for calls of this execution, and
  // waits for the stream. The hybrid one expects nnz active neurons per token, and union_neurons in
  // a tile of 128 tokens (negative: unknown, so as many as nnz allows). These are hints and no
  // limits: backward computes again what did not fit. Error where the execution is not supported.
  void prepare(CudaContext& ctx, FfnTrainExecution execution, double nnz,
               double union_neurons = -1.0);
  int64_t bytes() const { return owned.bytes(); }  // of its own memory
  static int64_t bytes_needed(const FfnTrainShapeCuda& shape, FfnTrainExecution execution,
                              double nnz, double union_neurons = -1.0);

  // Set by the functions here; callers only read.
  FfnTrainShapeCuda shape;
  FfnTrainExecution execution = FfnTrainExecution::kDense;
  HybridCapacityCuda capacity;
  int64_t tokens = 0;           // of the forward whose activations are saved, or 0
  TwellPacked replay;           // of that forward
  std::byte* memory = nullptr;  // of `owned`, or the caller's
  DeviceBuffer<std::byte> owned;

 private:
  void plan(const CudaContext& ctx, FfnTrainExecution execution, double nnz, double union_neurons);
};

// Memory of one call in flight, shared by all layers of a shape on one stream.
struct FfnTrainWorkspaceCuda {
  // The first kOwnBytes bytes belong to the workspace at all times. Others may use the rest between
  // calls.
  static constexpr int64_t kOwnBytes = 256;

  // In bytes_needed() bytes of the caller's device memory, aligned to 256, or of its own. Where
  // hybrid is false or not supported, it refuses hybrid calls.
  FfnTrainWorkspaceCuda(CudaContext& ctx, const FfnTrainShapeCuda& shape, bool hybrid = true,
                        std::byte* memory = nullptr);
  static int64_t bytes_needed(const CudaContext& ctx, const FfnTrainShapeCuda& shape,
                              bool hybrid = true);

  FfnTrainShapeCuda shape;
  bool hybrid;  // has room for the hybrid execution
  int64_t bytes;
  DeviceBuffer<std::byte> owned;
  std::byte* memory;  // of `owned`, or the caller's
};

// The activity of a layer. In device memory. Kernels add to it; its reader clears it.
struct FfnTrainCountsCuda {
  unsigned long long nnz;  // active (token, neuron) pairs
  unsigned long long tokens;
  // Sum over tiles of 128 tokens of the neurons that are active on any of the tile's tokens. The
  // cost of the hybrid execution follows it rather than nnz, because tokens of one text share
  // neurons.
  unsigned long long union_neurons;
  double l1_sum;  // sum over tokens and neurons of |h|
  int32_t max_row_nnz;
  // Chunks of 16,384 tokens whose pattern outgrew the memory kept for it, so that backward computed
  // it again.
  int32_t recomputed;
};

struct FfnTrainForwardCuda {
  int64_t tokens = 0;  // M
  FfnWeightsCuda weights;
  // The share of ReLU in a blend with it, one value in device memory; null: none.
  const float* relu_share = nullptr;
  const __nv_bfloat16* x = nullptr;      // [M, D]
  __nv_bfloat16* y = nullptr;            // [M, D] written; may not overlap x
  FfnTrainCountsCuda* counts = nullptr;  // of this layer, or null
  uint8_t* active = nullptr;  // [F]: set to 1 for each neuron that fires on any token; or null
  // For benchmarks: the hybrid execution runs the gate GEMM but then uses these activations (C = 8,
  // row_nnz set) in place of its result, in backward too. words null: it does not. The dense
  // execution ignores it.
  TwellPacked replay;
};
// Runs the execution that `saved` was prepared for.
void ffn_train_forward_cuda(CudaContext& ctx, const FfnTrainForwardCuda& problem,
                            FfnSavedCuda& saved, FfnTrainWorkspaceCuda& workspace);

// Gradient of  <y, d_y> + l1_scale * sum |h|  (|.| has gradient 0 at 0).
struct FfnTrainBackwardCuda {
  int64_t tokens = 0;                  // M of the forward
  FfnWeightsCuda weights;              // of the forward
  const float* relu_share = nullptr;   // of the forward
  const __nv_bfloat16* x = nullptr;    // [M, D] of the forward
  const __nv_bfloat16* d_y = nullptr;  // [M, D]
  const float* l1_scale = nullptr;     // one value, see FfnTrainBackward
  __nv_bfloat16* d_x = nullptr;        // [M, D] written; may not overlap x or d_y
  FfnTrainGradsCuda grads;
};
// At most once after each forward, because it overwrites what was saved.
void ffn_train_backward_cuda(CudaContext& ctx, const FfnTrainBackwardCuda& problem,
                             FfnSavedCuda& saved, FfnTrainWorkspaceCuda& workspace);

// A layer of this shape, as the registry of executions sees it.
GpuFfnLayer gpu_ffn_layer(const CudaContext& ctx, const FfnTrainShapeCuda& shape);
// Why the hybrid execution cannot run on this context's device or shape; empty when it can.
std::string ffn_train_hybrid_unsupported(const CudaContext& ctx, const FfnTrainShapeCuda& shape);

}  // namespace twell
