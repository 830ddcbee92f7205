// SPDX-License-Identifier: Apache-2.0
// The two executions behind ffn_train.h on the CPU, and what they share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "twell/base/buffer.h"
#include "twell/base/rounding.h"
#include "twell/ops/ffn_train/ffn_train.h"

namespace twell {

FfnTrainStats dense_forward(Context& ctx, const FfnTrainForward& problem, FfnSaved& saved);
void dense_backward(Context& ctx, const FfnTrainBackward& problem, const FfnSaved& saved);

// False when the tail cannot hold the heavy rows. Then y and active are untouched, and the caller
// runs the dense execution.
[[nodiscard]] bool hybrid_forward(Context& ctx, const FfnTrainForward& problem, FfnSaved& saved,
                                  FfnTrainStats& stats);
void hybrid_backward(Context& ctx, const FfnTrainBackward& problem, const FfnSaved& saved);

// Dense backward of some rows, which need not be neighbours in the batch.
struct DenseBackwardStep {
  ConstMatrixF x;     // [rows, D]
  ConstMatrixF d_y;   // [rows, D]
  ConstMatrixF gate;  // [rows, F] as FfnSaved::dense_gate
  ConstMatrixF up;    // [rows, F] u; empty when not gated
  MatrixF d_x;        // [rows, D], written
};
void dense_backward_step(Context& ctx, const FfnWeights& weights, float l1_scale,
                         const DenseBackwardStep& step, const FfnGrads& grads);

// Tokens per step of the dense work. The scratch memory of a step is a few [chunk, F] matrices, and
// its GEMMs are so large that adding to the weight gradients once per step costs nothing.
inline constexpr int64_t kDenseChunk = 512;

// The neurons that fired. Each thread sets flags of its own, so that no two threads write one byte.
class FiredFlags {
 public:
  // With an empty `active` every function does nothing.
  FiredFlags(Context& ctx, Arena::Scope& scope, std::span<uint8_t> active);
  // Flags [F] of a thread of parallel_for; null when `active` is empty.
  float* of_thread(int thread) const;
  void merge() const;  // sets active[j] where any thread's flag j is set

 private:
  std::span<uint8_t> active_;
  MatrixF fired_;  // [threads, F] 0 or 1
};

// Heavy rows are padded to a multiple of this many, so that their GEMMs come in few shapes.
inline int64_t tail_granularity(int64_t tail_capacity) {
  return std::min<int64_t>(32, tail_capacity);
}
inline int64_t padded_tail(int64_t rows, int64_t tail_capacity) {
  return round_up(rows, tail_granularity(tail_capacity));
}

}  // namespace twell
