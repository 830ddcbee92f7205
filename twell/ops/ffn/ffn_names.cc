// SPDX-License-Identifier: Apache-2.0
// Names of executions and policies, for builds without the CPU's kernels too.
#include <algorithm>

#include "twell/base/error.h"
#include "twell/ops/ffn/ffn.h"

namespace twell {
namespace {

// The names stand in the order of the enumerations in ffn.h, which index these tables.
constexpr std::string_view kExecutions[kFfnExecutions] = {
    "dense", "row-fused", "tile-union", "decode-rows", "small-batch", "screened"};
constexpr std::string_view kPolicies[] = {"auto",       "dense",    "row-fused",
                                          "tile-union", "screened", "screened-strict"};

}  // namespace

std::string_view ffn_execution_name(FfnExecution execution) {
  return kExecutions[static_cast<size_t>(execution)];
}

std::string_view ffn_policy_name(FfnPolicy policy) {
  return kPolicies[static_cast<size_t>(policy)];
}

FfnPolicy parse_ffn_policy(std::string_view name) {
  const auto found = std::ranges::find(kPolicies, name);
  TWELL_REQUIRE(found != std::end(kPolicies),
                "unknown FFN execution '{}': use auto, dense, row-fused, tile-union, screened or "
                "screened-strict",
                name);
  return static_cast<FfnPolicy>(found - kPolicies);
}

}  // namespace twell
