// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/gpu_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace twell {
namespace {

// One H200, in microseconds; docs/kernels.md has the measurements they are fitted to. Rates are of
// one of its 132 multiprocessors, so that a smaller device is slower in proportion.
constexpr double kDenseFlops = 800e6 / 132;  // operations per us: a large bf16 GEMM
constexpr double kUnionFlops = 670e6 / 132;  // the two GEMMs with gathered weight rows
constexpr double kBytes = 4.0e6 / 132;       // bytes per us of device memory
constexpr double kRowBytes = 8.0e6 / 132;    // of rows gathered from the L2 cache
constexpr double kRowFused = 20.0;           // lists, and the tail of long rows
constexpr int64_t kFewRows = 8;              // tokens of kernels of their own:
constexpr double kFewRow = 0.1;              // per token,
constexpr double kFewRowNeuron = 0.005;      // and per neuron that fires
constexpr double kFewLatency = 6.7;          // 9 to 64 tokens: of their two kernels,
constexpr double kFewNeuron = 0.0010;        // per neuron that fires,
constexpr double kFewNeuronToken = 18e-6;    // and more of it with every token
constexpr double kKernel = 3.0;              // a kernel too small to fill the device
constexpr double kUnions = 12.5;             // finding unions: latency for the most part
constexpr double kImages = 22.5;             // more of it without a gate: compacting activations
constexpr double kPacking = 1.02;            // gate GEMM that packs, against one that does not
constexpr double kSpill = 0.06;              // more of it when every tile spills,
constexpr double kSpilledValue = 7.0;        // and bytes moved per value before up and down
constexpr double kTile = 128.0;              // tokens
constexpr double kGateRows = 256.0;          // of a gate GEMM tile of two multiprocessors
constexpr double kGateColumns = 256.0;
constexpr double kUpNeurons = 192.0;  // of a tile-union item of one multiprocessor
constexpr double kDownColumns = 256.0;

// Sparse has to promise this share of the dense cost: the model is off by some percent.
constexpr double kSparseShare = 0.93;

struct Sizes {
  double m, d, f, sms;
  Sizes(const GpuLayerShape& shape, int64_t tokens)
      : m(static_cast<double>(tokens)),
        d(static_cast<double>(shape.width)),
        f(static_cast<double>(shape.ffn)),
        sms(static_cast<double>(std::max<int64_t>(shape.multiprocessors, 2))) {}
};

double move(const Sizes& s, double bytes) { return bytes / (kBytes * s.sms); }

// cuBLASLt picks tiles that fit. Below a few hundred tokens a GEMM reads its weight and little
// else.
double dense_gemm(const Sizes& s) {
  return std::max(2.0 * s.m * s.d * s.f / (kDenseFlops * s.sms), move(s, 2.0 * s.d * s.f)) +
         kKernel;
}

// Of equal items, one per multiprocessor (or pair) at a time.
double rounds(double items, double workers) { return std::ceil(items / workers); }

double packed_gate(const Sizes& s, double density) {
  const double items = std::ceil(s.m / kGateRows) * std::ceil(s.f / kGateColumns);
  const double item = 2.0 * kGateRows * kGateColumns * s.d / (2.0 * kDenseFlops);
  // A last round of at most half as many is cut in two.
  const double pairs = std::floor(s.sms / 2.0);
  const double all = 0.5 * std::ceil(2.0 * items / pairs);
  return all * item * (kPacking + kSpill * density) + 2.0 * kKernel;
}

double density_of(const Sizes& s, const LayerActivity& activity) {
  return std::min(activity.nnz_per_token / s.f, 1.0);
}

// Neurons that fire for at least one of n tokens, were they to fire independently: at most as many
// do.
double independent_union(const Sizes& s, const LayerActivity& activity, double n) {
  return s.f * (1.0 - std::pow(1.0 - density_of(s, activity), n));
}

}  // namespace

double gpu_dense_cost(const GpuLayerShape& shape, int64_t tokens) {
  const Sizes s(shape, tokens);
  if (!shape.gated) return 2.0 * dense_gemm(s);
  return 3.0 * dense_gemm(s) + move(s, 3.0 * 2.0 * s.m * s.f) + kKernel;
}

double gpu_tile_union_cost(const GpuLayerShape& shape, int64_t tokens,
                           const LayerActivity& activity) {
  const Sizes s(shape, tokens);
  const double density = density_of(s, activity);
  const double neurons = activity.union_share >= 0.0 ? activity.union_share * s.f
                                                     : independent_union(s, activity, kTile);
  const double tiles = std::ceil(std::ceil(s.m / kTile) * (1.0 + activity.extra_tiles));
  const double padded = std::min(neurons + 32.0, s.f);  // whole blocks of 64
  const double up_item = 2.0 * kTile * kUpNeurons * s.d / kUnionFlops;
  const double down_item = 2.0 * kTile * kDownColumns * padded / kUnionFlops;
  double cost = packed_gate(s, density) + kUnions + 2.0 * kKernel + move(s, 2.0 * 2.0 * s.m * s.d) +
                move(s, kSpilledValue * s.m * s.f * density);
  // Down fills the gaps of the last round of up.
  cost += shape.gated ? std::max(tiles * padded / kUpNeurons / s.sms, 1.0) * up_item : kImages;
  // Unions differ in size: half an item is left to wait for.
  return cost + (rounds(tiles * std::ceil(s.d / kDownColumns), s.sms) + 0.5) * down_item;
}

double gpu_row_fused_cost(const GpuLayerShape& shape, int64_t tokens,
                          const LayerActivity& activity) {
  const Sizes s(shape, tokens);
  const double products = shape.gated ? 2.0 : 1.0;
  if (shape.hopper && tokens <= kFewTokens) {
    // Reads the first weight, and the other ones' rows that are needed.
    const double active = independent_union(s, activity, s.m);
    const double bytes = move(s, 2.0 * s.d * (s.f + products * active));
    if (tokens <= kFewRows) {
      return bytes + 1.5 * kKernel + kFewRow * s.m + kFewRowNeuron * active;
    }
    return bytes + kFewLatency + (kFewNeuron + kFewNeuronToken * s.m) * active;
  }
  const double row = 2.0 * s.d / (kRowBytes * s.sms);  // of a weight, from the L2 cache
  return packed_gate(s, density_of(s, activity)) + kRowFused + move(s, 2.0 * 2.0 * s.m * s.d) +
         products * s.m * activity.nnz_per_token * row;
}

GpuChoice choose_gpu_execution(const GpuLayerShape& shape, int64_t tokens, FfnPolicy policy,
                               const LayerActivity& activity) {
  const bool few = shape.hopper && tokens <= kFewTokens;
  // Tiles of 128 tokens make no sense for a few, and need Hopper.
  const FfnExecution shared =
      shape.hopper && !few ? FfnExecution::kTileUnion : FfnExecution::kRowFused;
  switch (policy) {
    case FfnPolicy::kDense:
      return {FfnExecution::kDense, "set by the caller"};
    case FfnPolicy::kRowFused:
      return {FfnExecution::kRowFused, "set by the caller"};
    case FfnPolicy::kTileUnion:
      if (shape.hopper) return {FfnExecution::kTileUnion, "set by the caller"};
      return {FfnExecution::kRowFused, "tile-union needs a Hopper GPU"};
    case FfnPolicy::kAuto:
      break;
  }
  if (activity.nnz_per_token < 0.0) return {shared, "nothing measured yet"};
  const double dense = gpu_dense_cost(shape, tokens);
  const double row_fused = gpu_row_fused_cost(shape, tokens, activity) / dense;
  const double tile_union = shared == FfnExecution::kTileUnion
                                ? gpu_tile_union_cost(shape, tokens, activity) / dense
                                : row_fused;
  FfnExecution best = FfnExecution::kDense;
  if (std::min(row_fused, tile_union) < kSparseShare) {
    best = tile_union < row_fused ? FfnExecution::kTileUnion : FfnExecution::kRowFused;
  }
  return {best, fmt::format("{:.1f} of {} neurons active per token, union of 128 tokens {:.0f}: "
                            "row-fused estimated at {:.2f} of dense, tile-union at {:.2f}",
                            activity.nnz_per_token, shape.ffn,
                            std::max(activity.union_share, 0.0) * static_cast<double>(shape.ffn),
                            row_fused, tile_union)};
}

}  // namespace twell
