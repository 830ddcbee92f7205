// SPDX-License-Identifier: Apache-2.0
// The feed-forward layer in training: forward that keeps what backward needs, and backward with the
// L1 term's gradient on the non-zero pattern. Source: the TwELL paper, hybrid format.
//   dense   everything as GEMMs; keeps g and u [M, F] (non-gated: h), or for an activation other
//           than ReLU what stands in front of it, and u
//   hybrid  rows with at most W active neurons compact, heavier rows dense (format/hybrid.h): keeps
//           and works on active neurons only
// A neuron is active on a token when its ReLU passes something, g > 0; NaN counts as active, so
// that it reaches the loss. Both executions give the same result within accumulation order. When
// the heavy rows outgrow the tail, the hybrid execution turns to dense by itself and says so in the
// statistics.
// With another activation than ReLU the execution is dense whatever the policy, and what counts as
// active is what activation_rows.h says.
// Repeats bit for bit for a given shape and thread count.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "twell/base/buffer.h"
#include "twell/base/context.h"
#include "twell/base/matrix.h"
#include "twell/format/ffn_weights.h"
#include "twell/format/hybrid.h"

namespace twell {

enum class FfnTrainExecution { kDense, kHybrid };
enum class FfnTrainPolicy { kAuto, kDense, kHybrid };
std::string_view ffn_train_execution_name(FfnTrainExecution execution);
FfnTrainPolicy parse_ffn_train_policy(std::string_view name);  // "auto", "dense", "hybrid"

// Statistics of one forward pass over M tokens.
struct FfnTrainStats {
  FfnTrainExecution execution = FfnTrainExecution::kDense;
  int64_t tokens = 0;
  int64_t nnz = 0;  // active (token, neuron) pairs
  int64_t max_row_nnz = 0;
  int64_t tail_rows = 0;  // rows kept dense by the hybrid execution
  double l1_sum = 0.0;    // sum over tokens and neurons of |h|
};

// Saved activations of one layer for one micro-batch. Made once; its size is the dense plan's,
// which the hybrid execution never exceeds.
class FfnSaved {
 public:
  FfnSaved(int64_t max_tokens, int64_t ffn, bool gated);
  static int64_t bytes(int64_t max_tokens, int64_t ffn, bool gated);  // for the memory plan

  int64_t max_tokens() const { return max_tokens_; }
  int64_t ffn() const { return ffn_; }
  bool gated() const { return gated_; }

  // What the last forward left here; backward reads it, any number of times.
  FfnTrainExecution execution = FfnTrainExecution::kDense;
  int64_t tokens = 0;
  HybridF32 hybrid;  // of g (non-gated: h); views below
  MatrixF up;        // [M, W] u on the compact pattern, gated only
  MatrixF up_tail;   // [tail_capacity, F] u of the heavy rows, gated only

  // Dense plan for M tokens: g, or h when not gated, or what stands in front of the activation
  // when that is not ReLU; u.
  MatrixF dense_gate(int64_t m) const;  // [M, F]
  MatrixF dense_up(int64_t m) const;    // [M, F], gated only
  // Lays the hybrid plan out for M tokens in the same memory; false when not even an empty tail
  // fits (a handful of neurons).
  bool plan_hybrid(int64_t m);

 private:
  int64_t max_tokens_;
  int64_t ffn_;
  bool gated_;
  Buffer<float> storage_;
};

// The execution that kAuto picks; nnz_hint as below. Thresholds as measured by ffn_train_bench.
FfnTrainExecution choose_ffn_train_execution(int64_t tokens, int64_t width, int64_t ffn,
                                             double nnz_hint);

// y [M, D] = FFN(x [M, D]).
// policy kAuto picks by nnz_hint (mean non-zeros per token of this layer's previous step, or a
// negative number when unknown: dense).
// active [F], when given: active[j] is set to 1 for each neuron that fires on any token (others are
// left as they are, so that micro-batches of a step accumulate).
struct FfnTrainForward {
  FfnWeights weights;
  ConstMatrixF x;  // [M, D]
  MatrixF y;       // [M, D], written; may not overlap x
  FfnTrainPolicy policy = FfnTrainPolicy::kAuto;
  double nnz_hint = -1.0;
  std::span<uint8_t> active = {};
};
FfnTrainStats ffn_train_forward(Context& ctx, const FfnTrainForward& problem, FfnSaved& saved);

// Gradient of  <y, d_y> + l1_scale * sum |h|  (|.| has gradient 0 at 0).
struct FfnTrainBackward {
  FfnWeights weights;     // of the forward, its activation included
  ConstMatrixF x;         // [M, D] of the forward
  ConstMatrixF d_y;       // [M, D]
  float l1_scale = 0.0f;  // coefficient / (layers * tokens) for the recipe's sum reduction
  MatrixF d_x;            // [M, D], written; may not overlap x or d_y
  FfnGrads grads;         // accumulated
};
void ffn_train_backward(Context& ctx, const FfnTrainBackward& problem, FfnSaved& saved);

}  // namespace twell
