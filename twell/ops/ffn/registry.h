// SPDX-License-Identifier: Apache-2.0
// The registry of the ways to run a feed-forward layer on a GPU: a row for each execution says its
// name, the layers and calls it takes, what it costs and what launches it. Nothing else lists
// executions; callers ask here and decide nothing themselves. `twell doctor --executions` prints
// it.
//
// Plain arithmetic without CUDA headers: the choice depends only on its arguments, and its tests
// need no GPU.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "twell/ops/ffn/activity.h"
#include "twell/ops/ffn/ffn.h"
#include "twell/ops/ffn/gpu_layer.h"

namespace twell {

// A set of activations, a bit each.
struct ActivationSet {
  uint32_t bits = 0;
  constexpr bool has(Activation activation) const {
    return (bits >> static_cast<int>(activation) & 1) != 0;
  }
};
template <typename... Activations>
constexpr ActivationSet activation_set(Activations... activations) {
  return {((uint32_t{1} << static_cast<int>(activations)) | ...)};
}
inline constexpr ActivationSet kAnyActivation{~uint32_t{0}};

// What an execution takes. The defaults: on Hopper, bf16 weights without biases, ReLU and relu2, of
// any size, any number of tokens.
struct GpuFfnLimits {
  // Layers.
  int least_capability = 90;  // GPUs of these compute capabilities
  int most_capability = 90;
  uint32_t weights = static_cast<uint32_t>(GpuWeights::kBf16);  // a set of GpuWeights
  ActivationSet activations = activation_set(Activation::kRelu, Activation::kRelu2);
  bool biases = false;    // takes layers with biases
  bool screened = false;  // only gated layers with a screen, of a width that can be rotated
  int64_t most_width = INT64_MAX;    // D
  int64_t most_ffn = INT64_MAX;      // F
  int64_t most_weights = INT64_MAX;  // D F
  // Calls.
  int64_t least_tokens = 1;
  int64_t most_tokens = INT64_MAX;
  bool rows_in_shared_memory = false;    // at most GpuFfnLayer::row_tokens tokens
  int64_t most_activations = INT64_MAX;  // M F
  bool norm = false;                     // computes the norm in front
  bool counts_rows = false;              // counts active neurons per token
  bool maps_rows = false;                // takes rows of y in another order than those of x
};

struct FfnCallCuda;  // ffn_call_cuda.h

struct GpuFfnExecution {
  std::string_view name;  // as logs, metrics, benchmarks and `--ffn` show it
  bool sparse = true;     // skips neurons that are not active
  GpuFfnLimits limits = {};
  // Tokens of one launch; a larger call is cut into equal launches. The workspace may hold fewer.
  int64_t launch_tokens = INT64_MAX;
  // On Hopper it runs only where a caller names it, because others are always faster.
  bool only_named_on_hopper = false;
  bool counts_unions = false;  // a log states the unions its cost follows from
  // Estimated microseconds of a call.
  double (*cost)(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity);
  // Auto runs it below this share of the dense cost.
  double (*needed_share)(int64_t tokens, const LayerActivity& activity);
  // Enqueues one launch on the call's stream. Null in a build without CUDA.
  void (*launch)(const FfnCallCuda& call);

  operator FfnExecution() const { return {name, sparse}; }
};

// Dense executions are tried in this order, and so are sparse ones under the policy `sparse`.
std::span<const GpuFfnExecution> gpu_ffn_registry();
const GpuFfnExecution* find_gpu_ffn(std::string_view name);  // null: none of that name

// Why this execution cannot take the call, whatever the policy; empty when it can.
std::string gpu_ffn_unsupported(const GpuFfnExecution& execution, const GpuFfnLayer& layer,
                                const GpuFfnCall& call);
// The part of it that the layer alone decides.
std::string gpu_ffn_outside(const GpuFfnLimits& limits, const GpuFfnLayer& layer);

struct GpuFfnChoice {
  const GpuFfnExecution* execution = nullptr;  // never null in a choice that was made
  std::string reason;                          // one line with the numbers
  double cost = 0.0;        // estimated microseconds; 0 where nothing is measured
  double dense_cost = 0.0;  // the same for the dense execution
};
// What the policies run:
//   auto       the cheapest sparse execution where it is estimated to be clearly faster than dense;
//              before anything is measured a sparse one, which measures what dense cannot
//   screened   (-strict) the same; callers give such layers a screen
//   dense      the first dense one that takes the call
//   sparse     the first sparse one that takes the call, but no screened one and none that runs by
//              name alone
//   a name     that execution
// Dense, with the reason, where none of these takes the call. Error when dense does not take it
// either, which only happens for a norm where not gpu_ffn_takes_norm.
GpuFfnChoice choose_gpu_ffn(const GpuFfnLayer& layer, const GpuFfnCall& call,
                            const LayerActivity& activity);

// Whether a call of this many tokens under this policy may include the norm.
bool gpu_ffn_takes_norm(const GpuFfnLayer& layer, int64_t tokens,
                        FfnPolicy policy = FfnPolicy::kAuto);

// The most tokens of such calls; 0: none.
int64_t gpu_ffn_norm_tokens(const GpuFfnLayer& layer, FfnPolicy policy = FfnPolicy::kAuto);

// The registry as a table for people: a line per execution.
std::string gpu_ffn_registry_table();

}  // namespace twell
