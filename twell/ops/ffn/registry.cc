// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/registry.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "twell/base/error.h"
#include "twell/ops/ffn/costs.h"
#include "twell/ops/skinny/row_tokens.h"

namespace twell {

// Each execution's room defines its launch, in builds with CUDA alone.
#ifdef TWELL_HAVE_CUDA
#define TWELL_FFN_LAUNCH(function) function
#else
#define TWELL_FFN_LAUNCH(function) nullptr
#endif
void launch_dense_rows(const FfnCallCuda& call);
void launch_dense_batch(const FfnCallCuda& call);
void launch_dense_gemms(const FfnCallCuda& call);
void launch_dense_few_bytes(const FfnCallCuda& call);
void launch_few_tokens(const FfnCallCuda& call);
void launch_row_stream(const FfnCallCuda& call);
void launch_small_batch_bytes(const FfnCallCuda& call);
void launch_medium_batch(const FfnCallCuda& call);
void launch_tile_union(const FfnCallCuda& call);
void launch_portable_rows(const FfnCallCuda& call);
void launch_portable_batch(const FfnCallCuda& call);
void launch_portable_union(const FfnCallCuda& call);
void launch_screened(const FfnCallCuda& call);
void launch_row_fused(const FfnCallCuda& call);

namespace {

constexpr auto kBf16 = static_cast<uint32_t>(GpuWeights::kBf16);
constexpr auto kFp8 = static_cast<uint32_t>(GpuWeights::kFp8);
constexpr int kHopper = 90, kAnyGpu = 0, kNewest = std::numeric_limits<int>::max();
// Columns of x for which the kernels, which count the 16-byte pieces of a chunk of up to 2^18
// tokens in 32 bits, have room.
constexpr int64_t kUnionWidth = 131072;
constexpr int64_t kUnionFfn = 524288;                      // a bit per neuron in shared memory
constexpr int64_t kPortableFfn = 131072;                   // the same in 99 KiB
constexpr int64_t kUnionWeights = (int64_t{1} << 35) - 1;  // 16-byte pieces are counted in 32 bits
constexpr int64_t kStreamWidth = 4096;        // sums of y that fit into a CTA's registers
constexpr int64_t k2To24 = int64_t{1} << 24;  // neurons and columns are 32-bit in these kernels

// With more, tile-union is nearly always faster: its gate GEMM loads larger tiles.
constexpr int64_t kMediumActivations = 12'000'000;
constexpr int64_t kMediumFfn = 65536;  // at most so many segments as a CTA has threads

// Costs of screened layers are fitted to calls of 1,024 tokens and more.
constexpr int64_t kScreenedTokens = 1024;

// Tiles of 32 neurons, two for each of 132 SMs. With more cuBLASLt's products are faster.
constexpr int64_t kBatchFfn = 8448;

// Gates and products become h by ReLU, its square, a threshold or ReLU on both.
constexpr ActivationSet kZeros =
    activation_set(Activation::kRelu, Activation::kRelu2, Activation::kFatRelu, Activation::kDRelu);

constexpr std::array kRegistry = {
    GpuFfnExecution{.name = "dense-rows",
                    .sparse = false,
                    .limits = {.activations = kZeros,
                               .most_tokens = 8,
                               .rows_in_shared_memory = true,
                               .norm = true},
                    .cost = ffn_costs::dense_rows,
                    .needed_share = ffn_costs::sparse_share,
                    .launch = TWELL_FFN_LAUNCH(launch_dense_rows)},
    GpuFfnExecution{.name = "dense-batch",
                    .sparse = false,
                    .limits = {.activations = kZeros,
                               .most_width = k2To24,
                               .most_ffn = kBatchFfn,
                               .least_tokens = 9,
                               .most_tokens = 64},
                    .cost = ffn_costs::dense_batch,
                    .needed_share = ffn_costs::sparse_share,
                    .launch = TWELL_FFN_LAUNCH(launch_dense_batch)},
    GpuFfnExecution{
        .name = "dense-few-fp8",
        .sparse = false,
        .limits = {.weights = kFp8, .activations = kZeros, .most_width = k2To24, .most_tokens = 64},
        .cost = ffn_costs::dense_few_bytes,
        .needed_share = ffn_costs::sparse_share,
        .launch = TWELL_FFN_LAUNCH(launch_dense_few_bytes)},
    GpuFfnExecution{.name = "dense-gemms",
                    .sparse = false,
                    .limits = {.least_capability = kAnyGpu,
                               .most_capability = kNewest,
                               .weights = kBf16 | kFp8,
                               .activations = kAnyActivation,
                               .biases = true,
                               .counts_rows = true},
                    .cost = ffn_costs::dense_gemms,
                    .needed_share = ffn_costs::sparse_share,
                    .launch = TWELL_FFN_LAUNCH(launch_dense_gemms)},
    GpuFfnExecution{.name = "decode-rows",
                    .limits = {.activations = kZeros,
                               .most_width = k2To24,
                               .most_ffn = k2To24,
                               .most_tokens = 8,
                               .norm = true},
                    .cost = ffn_costs::decode_rows,
                    .needed_share = ffn_costs::sparse_share,
                    .launch = TWELL_FFN_LAUNCH(launch_few_tokens)},
    GpuFfnExecution{.name = "row-stream",
                    .limits = {.activations = kZeros,
                               .most_width = kStreamWidth,
                               .most_ffn = k2To24,
                               .most_tokens = 8,
                               .norm = true},
                    .cost = ffn_costs::row_stream,
                    .needed_share = ffn_costs::sparse_share,
                    .launch = TWELL_FFN_LAUNCH(launch_row_stream)},
    GpuFfnExecution{.name = "small-batch",
                    .limits = {.activations = kZeros,
                               .most_width = k2To24,
                               .most_ffn = k2To24,
                               .least_tokens = 9,
                               .most_tokens = 128},
                    .launch_tokens = 64,
                    .cost = ffn_costs::small_batch,
                    .needed_share = ffn_costs::sparse_share,
                    .launch = TWELL_FFN_LAUNCH(launch_few_tokens)},
    GpuFfnExecution{.name = "small-batch-fp8",
                    .limits = {.weights = kFp8,
                               .activations = kZeros,
                               .most_width = k2To24,
                               .most_ffn = k2To24,
                               .most_tokens = 64},
                    .cost = ffn_costs::small_batch_bytes,
                    .needed_share = ffn_costs::sparse_share,
                    .launch = TWELL_FFN_LAUNCH(launch_small_batch_bytes)},
    GpuFfnExecution{.name = "medium-batch",
                    .limits = {.activations = kZeros,
                               .most_width = kUnionWidth,
                               .most_ffn = kMediumFfn,
                               .most_weights = (int64_t{1} << 34) - 1,
                               .least_tokens = 9,
                               .most_tokens = 2048,
                               .most_activations = kMediumActivations},
                    .counts_unions = true,
                    .cost = ffn_costs::medium_batch,
                    .needed_share = ffn_costs::medium_batch_share,
                    .launch = TWELL_FFN_LAUNCH(launch_medium_batch)},
    // In fp8 both this and dense-gemms take about 0.6 of their time in bf16, so that the choice
    // between them is the same. Up to 64 tokens the rows above are faster.
    GpuFfnExecution{.name = "tile-union",
                    .limits = {.weights = kBf16 | kFp8,
                               .activations = kZeros,
                               .most_width = kUnionWidth,
                               .most_ffn = kUnionFfn,
                               .most_weights = kUnionWeights,
                               .counts_rows = true,
                               .maps_rows = true},
                    .counts_unions = true,
                    .cost = ffn_costs::tile_union,
                    .needed_share = ffn_costs::tile_union_share,
                    .launch = TWELL_FFN_LAUNCH(launch_tile_union)},
    GpuFfnExecution{.name = "screened",
                    .limits = {.activations = kZeros,
                               .screened = true,
                               .most_width = kMaxRotatedWidth,
                               .most_ffn = kUnionFfn,
                               .most_weights = kUnionWeights,
                               .least_tokens = kScreenedTokens,
                               .counts_rows = true,
                               .maps_rows = true},
                    .cost = ffn_costs::screened,
                    .needed_share = ffn_costs::tile_union_share,
                    .launch = TWELL_FFN_LAUNCH(launch_screened)},
    GpuFfnExecution{.name = "portable-rows",
                    .limits = {.least_capability = 80,
                               .most_capability = kNewest,
                               .activations = kZeros,
                               .most_width = k2To24,
                               .most_ffn = k2To24,
                               .most_tokens = 8,
                               .rows_in_shared_memory = true},
                    .only_named_on_hopper = true,
                    .cost = ffn_costs::portable_rows,
                    .needed_share = ffn_costs::sparse_share,
                    .launch = TWELL_FFN_LAUNCH(launch_portable_rows)},
    // With more tokens dense products on mma.sync are faster.
    GpuFfnExecution{.name = "portable-batch",
                    .limits = {.least_capability = 80,
                               .most_capability = kNewest,
                               .activations = kZeros,
                               .most_width = k2To24,
                               .most_ffn = k2To24,
                               .most_tokens = 32},
                    .only_named_on_hopper = true,
                    .cost = ffn_costs::portable_batch,
                    .needed_share = ffn_costs::sparse_share,
                    .launch = TWELL_FFN_LAUNCH(launch_portable_batch)},
    GpuFfnExecution{.name = "portable-union",
                    .limits = {.least_capability = 80,
                               .most_capability = kNewest,
                               .activations = kZeros,
                               .most_width = kUnionWidth,
                               .most_ffn = kPortableFfn,
                               .most_weights = kUnionWeights,
                               .counts_rows = true,
                               .maps_rows = true},
                    .only_named_on_hopper = true,
                    .counts_unions = true,
                    .cost = ffn_costs::portable_union,
                    .needed_share = ffn_costs::sparse_share,
                    .launch = TWELL_FFN_LAUNCH(launch_portable_union)},
    GpuFfnExecution{.name = "row-fused",
                    .limits = {.least_capability = 80,
                               .most_capability = kNewest,
                               .activations = kZeros,
                               .most_width = k2To24,
                               .most_ffn = k2To24,
                               .counts_rows = true},
                    .only_named_on_hopper = true,
                    .cost = ffn_costs::row_fused,
                    .needed_share = ffn_costs::sparse_share,
                    .launch = TWELL_FFN_LAUNCH(launch_row_fused)},
};

// Whether a policy that names executions names this one.
bool names(FfnPolicy policy, const GpuFfnExecution& execution) {
  switch (policy.kind) {
    case FfnPolicy::Kind::kDense:
      return !execution.sparse;
    case FfnPolicy::Kind::kNamed:
      return execution.name == policy.execution;
    default:
      return execution.sparse && !execution.limits.screened;
  }
}

// The first execution that `policy` names and that takes the call; null when there is none.
const GpuFfnExecution* first_of(const GpuFfnLayer& layer, const GpuFfnCall& call,
                                FfnPolicy policy) {
  for (const GpuFfnExecution& execution : kRegistry) {
    if (names(policy, execution) && gpu_ffn_unsupported(execution, layer, call).empty()) {
      return &execution;
    }
  }
  return nullptr;
}

// The sparse execution that auto weighs against dense: the cheapest one, or the first before
// anything is measured. Null where none takes the call.
const GpuFfnExecution* cheapest_sparse(const GpuFfnLayer& layer, const GpuFfnCall& call,
                                       const LayerActivity& activity) {
  const bool hopper = layer.device.compute_capability == kHopper;
  const GpuFfnExecution* best = nullptr;
  double least = 0.0;
  for (const GpuFfnExecution& execution : kRegistry) {
    if (!execution.sparse || (execution.only_named_on_hopper && hopper) ||
        !gpu_ffn_unsupported(execution, layer, call).empty()) {
      continue;
    }
    if (activity.nnz_per_token < 0.0) return &execution;
    const double cost = execution.cost(layer, call.tokens, activity);
    if (best != nullptr && cost >= least) continue;
    best = &execution;
    least = cost;
  }
  return best;
}

const GpuFfnExecution& required(const GpuFfnExecution* execution, const GpuFfnCall& call) {
  TWELL_CHECK(execution != nullptr, "no execution takes a feed-forward call of {} tokens{}{}",
              call.tokens, call.norm ? " with the norm in front" : "",
              call.counts_rows ? " with counts per token" : "");
  return *execution;
}

GpuFfnChoice chosen(const GpuFfnExecution& execution, std::string reason) {
  return {.execution = &execution, .reason = std::move(reason)};
}

GpuFfnChoice set_by_caller(const GpuFfnExecution& execution, const GpuFfnCall& call) {
  const std::string asked(ffn_policy_name(call.policy));
  if (asked == execution.name) return chosen(execution, "set by the caller");
  return chosen(execution, fmt::format("set by the caller: {}, which runs {} tokens as {} here",
                                       asked, call.tokens, execution.name));
}

// Why dense runs although the caller set another policy: what keeps the last execution it names,
// the most general one, from running.
std::string none_takes(const GpuFfnLayer& layer, const GpuFfnCall& call) {
  std::string why = "the GPU has no such execution";
  for (const GpuFfnExecution& execution : kRegistry) {
    if (names(call.policy, execution)) why = gpu_ffn_unsupported(execution, layer, call);
  }
  return fmt::format("{} was set, but {}", ffn_policy_name(call.policy), why);
}

// Why no sparse execution takes such layers at all; empty where some may.
std::string dense_alone(const GpuFfnLayer& layer) {
  const auto some = [](const auto& takes) {
    return std::ranges::any_of(kRegistry, [&](const GpuFfnExecution& execution) {
      return execution.sparse && takes(execution.limits);
    });
  };
  if (!some([&](const GpuFfnLimits& limits) { return limits.activations.has(layer.activation); })) {
    return fmt::format("{} leaves no zeros to skip", activation_name(layer.activation));
  }
  if (layer.biased && !some([](const GpuFfnLimits& limits) { return limits.biases; })) {
    return "layers with biases run dense";
  }
  return {};
}

std::string explain(const GpuFfnExecution& sparse, const GpuFfnLayer& layer,
                    const LayerActivity& activity, double share) {
  const auto ffn = static_cast<double>(layer.ffn);
  std::string unions;
  if (sparse.counts_unions && activity.union_share >= 0.0) {
    unions = fmt::format(", {:.0f} in the union of 128 tokens, {:.0f} in the largest",
                         activity.union_share * ffn,
                         std::max(activity.largest_union, activity.union_share) * ffn);
  } else if (sparse.limits.screened && activity.candidate_share >= 0.0) {
    unions = fmt::format(", {:.0f} candidates in the union of 128 tokens",
                         activity.candidate_share * ffn);
  }
  return fmt::format("{:.1f} of {} neurons active per token{}: {} estimated at {:.2f} of dense",
                     activity.nnz_per_token, layer.ffn, unions, sparse.name, share);
}

// --- The table for people ---

std::string tokens_text(const GpuFfnLimits& limits) {
  const int64_t least = limits.least_tokens;
  if (limits.most_tokens != INT64_MAX) return fmt::format("{} to {}", least, limits.most_tokens);
  return least == 1 ? "any" : fmt::format("{} on", least);
}

std::string gpus_text(const GpuFfnLimits& limits) {
  const int least = limits.least_capability, most = limits.most_capability;
  if (least == kAnyGpu && most == kNewest) return "any";
  if (most == kNewest) return fmt::format("{}.{} on", least / 10, least % 10);
  if (least == most) return fmt::format("{}.{}", least / 10, least % 10);
  return fmt::format("{}.{} to {}.{}", least / 10, least % 10, most / 10, most % 10);
}

std::string activations_text(const GpuFfnLimits& limits) {
  if (limits.activations.bits == kAnyActivation.bits) return "any";
  std::vector<std::string_view> names;
  for (const Activation activation : kActivations) {
    if (limits.activations.has(activation)) names.push_back(activation_name(activation));
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

std::string weights_text(const GpuFfnLimits& limits) {
  std::vector<std::string_view> names;
  for (const GpuWeights weights : kGpuWeights) {
    if ((limits.weights & static_cast<uint32_t>(weights)) != 0) {
      names.push_back(gpu_weights_name(weights));
    }
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

// A large limit as a power of two, of which it may be one less.
std::string size_text(int64_t most) {
  for (int power = 14; power < 63; ++power) {
    if (most == int64_t{1} << power || most == (int64_t{1} << power) - 1) {
      return fmt::format("2^{}", power);
    }
  }
  return most % 1'000'000 == 0 ? fmt::format("{}e6", most / 1'000'000) : std::to_string(most);
}

// Sizes are limited where 32 bits or shared memory end; most models are far below.
std::string sizes_text(const GpuFfnLimits& limits) {
  std::vector<std::string> parts;
  const auto add = [&](const char* name, int64_t most) {
    if (most != INT64_MAX) parts.push_back(fmt::format("{} {}", name, size_text(most)));
  };
  add("D", limits.most_width);
  add("F", limits.most_ffn);
  add("DF", limits.most_weights);
  add("MF", limits.most_activations);
  return parts.empty() ? "any" : fmt::format("{}", fmt::join(parts, " "));
}

std::string extras_text(const GpuFfnExecution& execution) {
  const GpuFfnLimits& limits = execution.limits;
  std::vector<std::string_view> parts;
  if (limits.norm) parts.push_back("norm");
  if (limits.biases) parts.push_back("biases");
  if (limits.counts_rows) parts.push_back("counts rows");
  if (limits.maps_rows) parts.push_back("maps rows");
  if (limits.screened) parts.push_back("screen");
  if (execution.only_named_on_hopper) parts.push_back("9.0 by name");
  return fmt::format("{}", fmt::join(parts, ", "));
}

}  // namespace

std::string gpu_ffn_registry_table() {
  std::vector<std::array<std::string, 7>> rows = {
      {"execution", "tokens", "GPU", "weights", "activations", "at most", "beside"}};
  for (const GpuFfnExecution& execution : kRegistry) {
    const GpuFfnLimits& limits = execution.limits;
    rows.push_back({std::string(execution.name), tokens_text(limits), gpus_text(limits),
                    weights_text(limits), activations_text(limits), sizes_text(limits),
                    extras_text(execution)});
  }
  std::array<size_t, 7> widths{};
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string table;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) line += fmt::format("{:<{}}  ", row[i], widths[i]);
    line.erase(line.find_last_not_of(' ') + 1);
    table += line + "\n";
  }
  return table;
}

std::string_view gpu_weights_name(GpuWeights weights) {
  return weights == GpuWeights::kBf16 ? "bf16" : "fp8";
}

GpuDevice gpu_device_of(const GpuProperties& properties) {
  // What holds from a capability on: rates of the tensor cores per SM and clock, as the whitepapers
  // of GA100, GA102, AD102, GH100, GB100 and GB202 state them, and the clock and memory of one card
  // (A100 40 GB, RTX A6000, L40S, H200, B200, RTX PRO 6000) for drivers that report neither.
  struct Generation {
    int least_capability;
    double mma_flops, gemm_flops, clock_ghz, bandwidth;
    bool geforce = false;  // of this capability there are GeForce cards
  };
  constexpr Generation kGenerations[] = {
      {120, 1024.0, 1024.0, 2.6, 1.792e6, true}, {110, 1024.0, 1024.0, 1.6, 0.273e6},
      {100, 2048.0, 8192.0, 1.965, 8.0e6},       {90, 2560.0, 4096.0, 1.98, 4.917e6},
      {89, 1024.0, 1024.0, 2.52, 0.864e6, true}, {86, 1024.0, 1024.0, 1.8, 0.768e6, true},
      {80, 2048.0, 2048.0, 1.41, 1.555e6},       {0, 512.0, 512.0, 1.5, 0.6e6}};
  const int capability = properties.compute_capability;
  const Generation& of = *std::ranges::find_if(
      kGenerations, [&](const Generation& g) { return capability >= g.least_capability; });
  const bool halved = of.geforce && properties.name.find("GeForce") != std::string_view::npos;
  GpuDevice device{.compute_capability = capability,
                   .multiprocessors = properties.multiprocessors,
                   .clock_ghz = of.clock_ghz,
                   .bandwidth = of.bandwidth,
                   .shared_memory = properties.shared_memory,
                   .mma_flops = of.mma_flops * (halved ? 0.5 : 1.0),
                   .gemm_flops = of.gemm_flops * (halved ? 0.5 : 1.0)};
  if (properties.clock_khz > 0) {
    device.clock_ghz = static_cast<double>(properties.clock_khz) * 1e-6;
  }
  const double bytes_per_ms = 2.0 * static_cast<double>(properties.memory_clock_khz) *
                              static_cast<double>(properties.memory_bus_bits) / 8.0;
  if (bytes_per_ms > 0.0) device.bandwidth = bytes_per_ms * 1e-3;
  return device;
}

int64_t gpu_row_tokens(const GpuDevice& device, int64_t width) {
  return layer_ops::row_tokens(device.shared_memory, width);
}

GpuFfnLayer gpu_ffn_layer(const GpuDevice& device, const GpuFfnShape& shape) {
  return {.width = shape.width,
          .ffn = shape.ffn,
          .gated = shape.gated,
          .activation = shape.activation,
          .biased = shape.biased,
          .weights = shape.weights,
          .row_tokens = gpu_row_tokens(device, shape.width),
          .device = device};
}

std::span<const GpuFfnExecution> gpu_ffn_registry() { return kRegistry; }

const GpuFfnExecution* find_gpu_ffn(std::string_view name) {
  const auto found = std::ranges::find(kRegistry, name, &GpuFfnExecution::name);
  return found == kRegistry.end() ? nullptr : &*found;
}

std::string gpu_ffn_outside(const GpuFfnLimits& limits, const GpuFfnLayer& layer) {
  const int capability = layer.device.compute_capability;
  if (capability < limits.least_capability || capability > limits.most_capability) {
    return fmt::format("the GPU is of compute capability {}.{}", capability / 10, capability % 10);
  }
  if (!limits.activations.has(layer.activation)) {
    return fmt::format(fmt::runtime(leaves_zeros(layer.activation) ? "it does not compute {}"
                                                                   : "{} leaves no zeros to skip"),
                       activation_name(layer.activation));
  }
  if ((limits.weights & static_cast<uint32_t>(layer.weights)) == 0) {
    return fmt::format("it does not take {} weights", gpu_weights_name(layer.weights));
  }
  if (layer.width > limits.most_width || layer.ffn > limits.most_ffn ||
      layer.width * layer.ffn > limits.most_weights) {
    return fmt::format("width {} and FFN size {} are too large for it", layer.width, layer.ffn);
  }
  if (layer.biased && !limits.biases) return "it adds no biases";
  if (limits.screened && !layer.screen) return "the layer's gate has no 8-bit copy";
  if (limits.screened && !layer.gated) return "the layer has no gate";
  if (limits.screened && !can_rotate(layer.width)) {
    return fmt::format("a width of {} is no multiple of 16", layer.width);
  }
  return {};
}

std::string gpu_ffn_unsupported(const GpuFfnExecution& execution, const GpuFfnLayer& layer,
                                const GpuFfnCall& call) {
  const GpuFfnLimits& limits = execution.limits;
  if (std::string why = gpu_ffn_outside(limits, layer); !why.empty()) return why;
  const int64_t most = limits.rows_in_shared_memory ? std::min(limits.most_tokens, layer.row_tokens)
                                                    : limits.most_tokens;
  if (call.tokens < limits.least_tokens || call.tokens > most) {
    return fmt::format("{} tokens, it takes {} to {}", call.tokens, limits.least_tokens, most);
  }
  if (call.tokens > limits.most_activations / layer.ffn) {
    return fmt::format("{} tokens of {} neurons, it takes up to {} activations", call.tokens,
                       layer.ffn, limits.most_activations);
  }
  if (call.norm && !limits.norm) return "it does not compute the norm in front";
  if (call.norm && call.tokens > layer.row_tokens) {
    return fmt::format("the norm of {} tokens, at most {}", call.tokens, layer.row_tokens);
  }
  if (call.counts_rows && !limits.counts_rows) return "it does not count active neurons per token";
  return {};
}

GpuFfnChoice choose_gpu_ffn(const GpuFfnLayer& layer, const GpuFfnCall& call,
                            const LayerActivity& activity) {
  const GpuFfnExecution* dense_one = first_of(layer, call, FfnPolicy::kDense);
  if (std::string why = dense_alone(layer); !why.empty()) {
    return chosen(required(dense_one, call), std::move(why));
  }
  if (!chooses(call.policy)) {
    const GpuFfnExecution* named = first_of(layer, call, call.policy);
    if (named != nullptr) return set_by_caller(*named, call);
    return chosen(required(dense_one, call), none_takes(layer, call));
  }
  const GpuFfnExecution& dense = required(dense_one, call);
  const GpuFfnExecution* sparse = cheapest_sparse(layer, call, activity);
  if (sparse == nullptr) {
    return chosen(dense, "no sparse execution takes a layer of this size");
  }
  if (activity.nnz_per_token < 0.0) return chosen(*sparse, "nothing measured yet");
  const double dense_us = dense.cost(layer, call.tokens, activity);
  const double sparse_us = sparse->cost(layer, call.tokens, activity);
  const bool pays = sparse_us < sparse->needed_share(call.tokens, activity) * dense_us;
  GpuFfnChoice choice =
      chosen(pays ? *sparse : dense, explain(*sparse, layer, activity, sparse_us / dense_us));
  choice.cost = pays ? sparse_us : dense_us;
  choice.dense_cost = dense_us;
  return choice;
}

bool gpu_ffn_takes_norm(const GpuFfnLayer& layer, int64_t tokens, FfnPolicy policy) {
  if (tokens < 1) return false;
  const GpuFfnCall call{.tokens = tokens, .norm = true};
  const auto takes = [&](FfnPolicy named) { return first_of(layer, call, named) != nullptr; };
  return takes(FfnPolicy::kDense) && takes(FfnPolicy::kSparse) &&
         (policy.kind != FfnPolicy::Kind::kNamed || takes(policy));
}

int64_t gpu_ffn_norm_tokens(const GpuFfnLayer& layer, FfnPolicy policy) {
  int64_t tokens = layer.row_tokens;
  while (tokens > 0 && !gpu_ffn_takes_norm(layer, tokens, policy)) --tokens;
  return tokens;
}

}  // namespace twell
