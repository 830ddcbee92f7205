// SPDX-License-Identifier: Apache-2.0
// The feed-forward layer at inference: picks and runs one of its executions.
//   dense        three library GEMMs
//   row-fused    gate GEMM -> TwELL; per token, up and down over its active neurons only
//   tile-union   gate GEMM -> TwELL; per tile of tokens, up and down over the union of the tile's
//                active neurons, each weight row read once
//   decode-rows  GPU, 1 to 8 tokens: two kernels that read w_gate once, and of w_up and w_down the
//                rows of active neurons
//   small-batch  the same for 9 to 64 tokens
//   screened     GPU: like tile-union, but an 8-bit product (rotated_screen.h) says which neurons
//                may fire, and only those are computed in bf16
// A policy names what to run; dispatch.h maps it to launches on a GPU. The CPU runs the first
// three.
// All give the dense result within accumulation order, on every input with finite weights. A NaN
// gate counts as active, so that NaN in x reaches y in all of them.
// That is for ReLU and relu2, its square. A layer with biases, or with another activation, runs
// dense whatever the policy says; its active neurons are those whose activation is not zero.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "twell/base/context.h"
#include "twell/base/matrix.h"
#include "twell/format/ffn_weights.h"

namespace twell {

enum class FfnExecution { kDense, kRowFused, kTileUnion, kDecodeRows, kSmallBatch, kScreened };
inline constexpr int kFfnExecutions = 6;
// kAuto: the fastest as measured. The last two are kAuto with 8-bit copies of the gates, where the
// GPU has an execution for them: kScreened with the probabilistic bound of rotated_screen.h,
// kScreenedStrict with the strict one. On the CPU they are kAuto.
enum class FfnPolicy { kAuto, kDense, kRowFused, kTileUnion, kScreened, kScreenedStrict };
// Whether the policy leaves the choice to what was measured.
constexpr bool chooses(FfnPolicy policy) {
  return policy == FfnPolicy::kAuto || policy == FfnPolicy::kScreened ||
         policy == FfnPolicy::kScreenedStrict;
}

std::string_view ffn_execution_name(FfnExecution execution);  // as above
// "auto", "dense", "row-fused", "tile-union", "screened", "screened-strict"; InputError
FfnPolicy parse_ffn_policy(std::string_view name);
std::string_view ffn_policy_name(FfnPolicy policy);

// The execution of one layer and its measured activity. One per layer and session. kAuto decides
// anew for each chunk of tokens, only from the non-zeros its gate GEMM has just produced (those of
// a few tokens, where they leave no doubt), so the same tokens give the same bits whatever came
// before.
struct FfnPlan {
  FfnPolicy policy = FfnPolicy::kAuto;
  FfnExecution execution = FfnExecution::kDense;  // of the last chunk of the last call
  std::string reason;                             // one line, for logs: why this execution
  // Measured over the calls so far (dense calls count too).
  int64_t tokens = 0;
  int64_t nnz = 0;  // active (token, neuron) pairs
  int64_t max_row_nnz = 0;
  // Some tokens' screens are checked against the whole gate. These count the pairs that fire there,
  // and those of them that the screen missed, whose results are left out.
  int64_t checked_pairs = 0;
  int64_t missed_pairs = 0;
  double nnz_per_token() const {
    return tokens == 0 ? 0.0 : static_cast<double>(nnz) / static_cast<double>(tokens);
  }
};

// y [M, D] = FFN(x [M, D]), both f32; weights f32, bf16 or f16, computed with as f32. y may not
// overlap x. Updates the plan.
// row_nnz [M], when given, receives the number of active neurons of each token.
// Scratch memory does not grow with M: tokens are worked on in chunks of at most kFfnChunkTokens.
void ffn_forward(Context& ctx, const StoredFfnWeights& weights, ConstMatrixF x, MatrixF y,
                 FfnPlan& plan, std::span<int32_t> row_nnz = {});

inline constexpr int64_t kFfnChunkTokens = 512;

}  // namespace twell
