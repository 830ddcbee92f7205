// SPDX-License-Identifier: Apache-2.0
// The feed-forward layer in training: a forward pass that keeps what backward needs, and a backward
// pass with the gradient of the L1 term on the non-zero pattern. Source: the TwELL paper, hybrid
// format. f32, row-major.
//   dense   everything as GEMMs; keeps the activation's input and u [M, F]; of a ReLU layer without
//           a gate h, in place of its input. Takes every activation
//   hybrid  rows with at most W active neurons compact, heavier rows dense (format/hybrid.h); keeps
//           and computes active neurons only
// A neuron of a layer whose activation leaves zeros is active on a token where the activation's
// input is not <= 0, or not <= FATReLU's threshold. NaN counts as active, so that it reaches the
// loss. Both executions give the same result within accumulation order. Where the heavy rows
// outgrow the tail, a hybrid call runs dense, and the statistics say so. With other activations,
// and with biases, the execution is dense whatever the policy, and activation_rows.h says which
// neurons are active. Repeats bit for bit for a given shape and thread count.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "twell/base/buffer.h"
#include "twell/base/context.h"
#include "twell/base/matrix.h"
#include "twell/format/ffn_weights.h"
#include "twell/format/hybrid.h"
#include "twell/ops/ffn_train/choice.h"

namespace twell {

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

// Saved activations of one layer for one micro-batch, in the size that the dense execution needs,
// which the hybrid one never exceeds.
class FfnSaved {
 public:
  FfnSaved(int64_t max_tokens, int64_t ffn, bool gated);
  // In bytes() bytes of the caller's memory, aligned to kAlignment.
  FfnSaved(int64_t max_tokens, int64_t ffn, bool gated, float* memory);
  static int64_t bytes(int64_t max_tokens, int64_t ffn, bool gated);  // for the memory plan

  int64_t max_tokens() const { return max_tokens_; }
  int64_t ffn() const { return ffn_; }
  bool gated() const { return gated_; }

  // What the last forward left here. Backward only reads it, so it may run several times.
  FfnTrainExecution execution = FfnTrainExecution::kDense;
  int64_t tokens = 0;
  HybridF32 hybrid;  // of g (non-gated: h); views below
  MatrixF up;        // [M, W] u on the compact pattern, gated only
  MatrixF up_tail;   // [tail_capacity, F] u of the heavy rows, gated only

  // Layout of the dense execution for M tokens: the activation's input, or h of a ReLU layer
  // without a gate; and u.
  MatrixF dense_gate(int64_t m) const;  // [M, F]
  MatrixF dense_up(int64_t m) const;    // [M, F], gated only
  // Lays the hybrid execution out for M tokens in the same memory. False where not even an empty
  // tail fits, which happens with a handful of neurons.
  bool plan_hybrid(int64_t m);

 private:
  int64_t max_tokens_;
  int64_t ffn_;
  bool gated_;
  Buffer<float> owned_;
  float* memory_;  // of owned_, or the caller's
};

// The execution that kAuto picks. nnz_hint is the mean number of active neurons per token in this
// layer's previous step, or negative when unknown (then dense).
FfnTrainExecution choose_ffn_train_execution(int64_t tokens, int64_t width, int64_t ffn,
                                             double nnz_hint);

// y [M, D] = FFN(x [M, D]).
// active [F], when given: active[j] is set to 1 for each neuron that fires on any token. The others
// are left as they are, so that the micro-batches of a step add up.
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
