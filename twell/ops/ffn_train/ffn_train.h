// SPDX-License-Identifier: Apache-2.0
// The feed-forward layer in training: forward that keeps what backward needs, and backward with the
// L1 term's gradient on the non-zero pattern. Source: the TwELL paper, hybrid format.
//   dense   everything as GEMMs; keeps g and u [M, F]
//   hybrid  rows with at most W active neurons in compact ELL, heavier rows dense: keeps and works
//   on
//           active neurons only. Exact: a row that does not fit one part goes to the other.
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
  // ... storage, defined by the room
};

// y [M, D] = FFN(x [M, D]).
// policy kAuto picks by nnz_hint (mean non-zeros per token of this layer's previous step, or a
// negative number when unknown: dense).
// active [F], when given: active[j] is set to 1 for each neuron that fires on any token (others are
// left as they are, so that micro-batches of a step accumulate).
struct FfnTrainForward {
  FfnWeights weights;
  ConstMatrixF x;  // [M, D]
  MatrixF y;       // [M, D]
  FfnTrainPolicy policy = FfnTrainPolicy::kAuto;
  double nnz_hint = -1.0;
  std::span<uint8_t> active;
};
FfnTrainStats ffn_train_forward(Context& ctx, const FfnTrainForward& problem, FfnSaved& saved);

// Gradient of  <y, d_y> + l1_scale * sum |h|  (|.| has gradient 0 at 0).
struct FfnTrainBackward {
  FfnWeights weights;
  ConstMatrixF x;         // [M, D] of the forward
  ConstMatrixF d_y;       // [M, D]
  float l1_scale = 0.0f;  // coefficient / (layers * tokens) for the recipe's sum reduction
  MatrixF d_x;            // [M, D], written
  FfnGrads grads;         // accumulated
};
void ffn_train_backward(Context& ctx, const FfnTrainBackward& problem, FfnSaved& saved);

}  // namespace twell
