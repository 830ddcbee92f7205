// SPDX-License-Identifier: Apache-2.0
// The two executions behind ffn_train.h, and what they share.
#pragma once

#include <cstdint>
#include <span>

#include "twell/base/buffer.h"
#include "twell/ops/ffn_train/ffn_train.h"

namespace twell {

FfnTrainStats dense_forward(Context& ctx, const FfnTrainForward& problem, FfnSaved& saved);
void dense_backward(Context& ctx, const FfnTrainBackward& problem, const FfnSaved& saved);

// False when the heavy rows outgrow the tail: y and active are untouched, and the caller runs
// dense.
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

// Tokens per step of the dense work. The scratch of a step is a few [chunk, F] matrices, and its
// GEMMs are large enough that rewriting the weight gradients per step costs nothing.
inline constexpr int64_t kDenseChunk = 512;

// Which neurons fired, gathered without two threads writing one byte.
class FiredFlags {
 public:
  // Does nothing when active is empty.
  FiredFlags(Context& ctx, Arena::Scope& scope, std::span<uint8_t> active);
  // [F] of one thread of parallel_for; null when nobody asked.
  float* of_thread(int thread) const;
  void merge() const;  // into active

 private:
  std::span<uint8_t> active_;
  MatrixF fired_;  // [threads, F] 0 or 1
};

}  // namespace twell
