// SPDX-License-Identifier: Apache-2.0
// Names of executions and policies.
#include "twell/base/error.h"
#include "twell/ops/ffn/ffn.h"

namespace twell {

std::string_view ffn_execution_name(FfnExecution execution) {
  switch (execution) {
    case FfnExecution::kRowFused:
      return "row-fused";
    case FfnExecution::kTileUnion:
      return "tile-union";
    case FfnExecution::kDecodeRows:
      return "decode-rows";
    case FfnExecution::kSmallBatch:
      return "small-batch";
    default:
      return "dense";
  }
}

FfnPolicy parse_ffn_policy(std::string_view name) {
  if (name == "auto") return FfnPolicy::kAuto;
  if (name == "dense") return FfnPolicy::kDense;
  if (name == "row-fused") return FfnPolicy::kRowFused;
  if (name == "tile-union") return FfnPolicy::kTileUnion;
  throw InputError(
      fmt::format("unknown FFN execution '{}': use auto, dense, row-fused or tile-union", name));
}

std::string_view ffn_policy_name(FfnPolicy policy) {
  switch (policy) {
    case FfnPolicy::kDense:
      return "dense";
    case FfnPolicy::kRowFused:
      return "row-fused";
    case FfnPolicy::kTileUnion:
      return "tile-union";
    default:
      return "auto";
  }
}

}  // namespace twell
