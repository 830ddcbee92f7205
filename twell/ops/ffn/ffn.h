// SPDX-License-Identifier: Apache-2.0
// The feed-forward layer at inference: picks and runs one of its executions.
//   dense        three library GEMMs
//   row-fused    gate GEMM -> TwELL; per token, up and down over its active neurons only
//   tile-union   gate GEMM -> TwELL; per tile of tokens, up and down over the union of the tile's
//                active neurons, each weight row read once
// The CPU runs these three; a GPU has more (registry.h). A policy says what to run.
// All give the dense result within accumulation order, on every input with finite weights. A NaN
// gate counts as active, so that NaN in x reaches y in all of them.
// That is for activations that leave zeros. A layer with biases, or with another activation, runs
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

// What a call ran. Its name is what logs, metrics, benchmarks and `--ffn` show; that of a GPU's
// execution is the name of its row in registry.h.
struct FfnExecution {
  std::string_view name;  // of static storage
  bool sparse = false;    // neurons that are not active are skipped

  static const FfnExecution kDense, kRowFused, kTileUnion;  // those of the CPU
  bool operator==(const FfnExecution& other) const { return name == other.name; }
  auto operator<=>(const FfnExecution& other) const { return name <=> other.name; }
};
inline constexpr FfnExecution FfnExecution::kDense{"dense", false};
inline constexpr FfnExecution FfnExecution::kRowFused{"row-fused", true};
inline constexpr FfnExecution FfnExecution::kTileUnion{"tile-union", true};

// What to run. kAuto: the fastest as measured. kSparse: any sparse execution that takes the call.
// kScreened and kScreenedStrict are kAuto with 8-bit copies of the gates, where the GPU has an
// execution for them: the first with the probabilistic bound of rotated_screen.h, the second with
// the strict one; on the CPU they are kAuto. kNamed: the execution of this name, where it takes the
// call, else dense.
struct FfnPolicy {
  enum class Kind : uint8_t { kAuto, kDense, kSparse, kScreened, kScreenedStrict, kNamed };
  Kind kind = Kind::kAuto;
  std::string_view execution = {};  // of static storage; only of kNamed

  static const FfnPolicy kAuto, kDense, kSparse, kScreened, kScreenedStrict;
  static const FfnPolicy kRowFused, kTileUnion;  // by name, on both devices
  bool operator==(const FfnPolicy&) const = default;
};
inline constexpr FfnPolicy FfnPolicy::kAuto{FfnPolicy::Kind::kAuto};
inline constexpr FfnPolicy FfnPolicy::kDense{FfnPolicy::Kind::kDense};
inline constexpr FfnPolicy FfnPolicy::kSparse{FfnPolicy::Kind::kSparse};
inline constexpr FfnPolicy FfnPolicy::kScreened{FfnPolicy::Kind::kScreened};
inline constexpr FfnPolicy FfnPolicy::kScreenedStrict{FfnPolicy::Kind::kScreenedStrict};
inline constexpr FfnPolicy FfnPolicy::kRowFused{FfnPolicy::Kind::kNamed, "row-fused"};
inline constexpr FfnPolicy FfnPolicy::kTileUnion{FfnPolicy::Kind::kNamed, "tile-union"};

// Whether the policy leaves the choice to what was measured.
constexpr bool chooses(FfnPolicy policy) {
  return policy.kind == FfnPolicy::Kind::kAuto || policy.kind == FfnPolicy::Kind::kScreened ||
         policy.kind == FfnPolicy::Kind::kScreenedStrict;
}

// "auto", "dense", "sparse", "screened", "screened-strict", or the name of an execution of the CPU
// or of registry.h. InputError with these names.
FfnPolicy parse_ffn_policy(std::string_view name);
std::string_view ffn_policy_name(FfnPolicy policy);
// All names that parse_ffn_policy takes, for help texts: "auto, dense, ...".
std::string ffn_policy_names();

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
