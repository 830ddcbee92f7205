// SPDX-License-Identifier: Apache-2.0
// What the launch of an execution gets: the call, the layer's plan, and memory to work in. For the
// rooms of executions; callers of a layer need ffn_cuda.h.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>

#include "twell/base/cuda.h"
#include "twell/ops/ffn/activity_cuda.h"
#include "twell/ops/ffn/dense/dense_ffn_cuda.h"
#include "twell/ops/ffn/few_tokens/batch_ffn_cuda.h"
#include "twell/ops/ffn/ffn_weights_cuda.h"
#include "twell/ops/ffn/row_fused/row_fused_cuda.h"
#include "twell/ops/ffn/screened/rotated_screen.h"
#include "twell/ops/ffn/tile_union/tile_union_cuda.h"

namespace twell {

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
  // [rows, D] x in e4m3, in place of that in bf16, for weights in e4m3.
  ByteRowsCuda x_bytes;
  bool in_bytes() const { return !x_bytes.empty(); }
  // [M, D] x rotated with the bound of weights.screen, read where ffn_reads_rotated; no values: the
  // layer runs without its screen.
  RotatedRowsCuda rotated;
};

// Device memory of one layer call in flight.
struct FfnBuffersCuda {
  GpuFfnLayer layer;                 // its shape and device
  DeviceBuffer<uint32_t> words;      // TwELL words of a chunk
  DeviceBuffer<__nv_bfloat16> gate;  // its spill slots, or the dense gate [chunk, F]
  DeviceBuffer<int32_t> row_nnz;     // [chunk]
  TileUnionWorkspace tile_union;     // its values double as the dense hidden [chunk, F]
  RowFusedWorkspace row_fused;
  FewTokenWorkspace few_tokens;
  // For calls in e4m3; empty until FfnWorkspaceCuda::make_for_bytes.
  DeviceBuffer<float> hidden_scales;  // [chunk] of h
  DeviceBuffer<uint8_t> w_down;       // [F, D] a layer's values; widened in a layer without a gate
  // By number of tokens, activation, whether y is added to, and whether there are biases.
  std::map<std::tuple<int64_t, Activation, bool, bool>, std::unique_ptr<DenseFfnCuda>> dense;

  __nv_bfloat16* wide_down() const { return reinterpret_cast<__nv_bfloat16*>(w_down.data()); }
};

// One launch: at most as many tokens as the execution takes at once.
struct FfnCallCuda {
  CudaContext& ctx;
  const FfnForwardCuda& problem;
  FfnPlanCuda& plan;
  FfnBuffersCuda& buffers;

  int64_t width() const { return buffers.layer.width; }
  int64_t ffn() const { return buffers.layer.ffn; }
  bool gated() const { return buffers.layer.gated; }
  bool squared() const { return problem.weights.activation == Activation::kRelu2; }
  bool up_relu() const { return problem.weights.activation == Activation::kDRelu; }
  uint32_t cut() const { return bf16_cut(problem.weights.activation, problem.weights.threshold); }
};

inline constexpr int64_t kTwellTile = 256;
TwellShape ffn_twell_shape(int64_t tokens, int64_t ffn);

// The problem of executions of few tokens and medium batches.
BatchFfnCuda batch_ffn(const FfnCallCuda& call);
// Runs the device's gate GEMM, or that of portable-union, and returns the problem of what follows
// it.
SparseUpDownCuda packed_gate(const FfnCallCuda& call, const GateProgress& progress = {},
                             bool portable = false);
// w_down in e4m3 with a row per neuron: that of the weights, or made in the call's buffer.
const uint8_t* make_down_rows(const FfnCallCuda& call);

}  // namespace twell
