// SPDX-License-Identifier: Apache-2.0
// Names of policies, for builds without the CPU's kernels too.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "twell/base/error.h"
#include "twell/ops/ffn/ffn.h"
#include "twell/ops/ffn/registry.h"

namespace twell {
namespace {

// The names stand in the order of FfnPolicy::Kind.
constexpr std::string_view kPolicies[] = {"auto", "dense", "sparse", "screened", "screened-strict"};

}  // namespace

std::string_view ffn_policy_name(FfnPolicy policy) {
  if (policy.kind == FfnPolicy::Kind::kNamed) return policy.execution;
  return kPolicies[static_cast<size_t>(policy.kind)];
}

std::string ffn_policy_names() {
  std::string names = fmt::format("{}", fmt::join(kPolicies, ", "));
  for (const GpuFfnExecution& execution : gpu_ffn_registry()) {
    if (std::ranges::find(kPolicies, execution.name) == std::end(kPolicies)) {
      names += fmt::format(", {}", execution.name);
    }
  }
  return names;
}

FfnPolicy parse_ffn_policy(std::string_view name) {
  const auto found = std::ranges::find(kPolicies, name);
  if (found != std::end(kPolicies)) {
    return {static_cast<FfnPolicy::Kind>(found - std::begin(kPolicies))};
  }
  // The CPU's executions have the names of executions of the GPU.
  const GpuFfnExecution* execution = find_gpu_ffn(name);
  TWELL_REQUIRE(execution != nullptr, "unknown FFN execution '{}': use one of {}", name,
                ffn_policy_names());
  return {FfnPolicy::Kind::kNamed, execution->name};
}

}  // namespace twell
