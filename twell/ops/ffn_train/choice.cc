// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn_train/choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "twell/ops/ffn/costs.h"
#include "twell/ops/ffn/registry.h"

namespace twell {
namespace {

// Microseconds on an H200, fitted to bench/ffn_train_cuda_bench with D 2048 and F 5632. On other
// GPUs than Hopper products take longer by the rates of their tensor cores, and the rest by their
// bandwidth.
constexpr GpuDevice kFitted;
double per_us(const GpuDevice& device, double flops) {
  return flops * static_cast<double>(device.multiprocessors) * device.clock_ghz;
}
double dense_slower(const GpuDevice& device) {
  if (device.compute_capability == kFitted.compute_capability) return 1.0;
  // A dense GEMM on mma.sync reaches a larger share of its rate than one on WGMMA does.
  const double more = device.gemm_flops > device.mma_flops ? 1.0 : 1.15;
  return per_us(kFitted, kFitted.gemm_flops) / (per_us(device, device.gemm_flops) * more);
}
double memory_slower(const GpuDevice& device) {
  if (device.compute_capability == kFitted.compute_capability) return 1.0;
  return kFitted.bandwidth / device.bandwidth;
}

struct Sizes {
  double m, d, f;
  Sizes(const GpuFfnLayer& layer, int64_t tokens)
      : m(static_cast<double>(tokens)),
        d(static_cast<double>(layer.width)),
        f(static_cast<double>(layer.ffn)) {}
};

// Nine GEMMs, and 18 bytes per token and neuron read and written between them.
double dense_train_cost(const GpuFfnLayer& layer, int64_t tokens) {
  constexpr double kMsPerTeraflop = 1.22, kMsPerGigabyte = 0.25, kMsPerCall = 0.05;
  const Sizes s(layer, tokens);
  return 1e3 *
         (9.0 * 2.0 * s.m * s.d * s.f * 1e-12 * kMsPerTeraflop * dense_slower(layer.device) +
          18.0 * s.m * s.f * 1e-9 * kMsPerGigabyte * memory_slower(layer.device) + kMsPerCall);
}

// The gate GEMM; eight products on the unions; per active pair, elementwise work and the tokens
// that weight gradients gather, which neurons of a tile share more the more neurons a token has;
// launches.
double hybrid_train_cost(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity) {
  const bool hopper = layer.device.compute_capability == kFitted.compute_capability;
  // Elsewhere as shares of the rate of mma.sync.
  constexpr double kGateShare = 0.7, kUnionShare = 0.6;
  const double mma_ms_per_teraflop = 1e6 / per_us(layer.device, layer.device.mma_flops);
  const double gate_ms_per_teraflop = hopper ? 1.59 : mma_ms_per_teraflop / kGateShare;
  const double union_ms_per_teraflop = hopper ? 1.61 : mma_ms_per_teraflop / kUnionShare;
  constexpr double kFew = 64.0, kMsPerGigapair = 559.0, kMsPerGigapairBeyond = 43.0;
  constexpr double kChunk = 16384.0, kMsPerChunk = 0.16;
  const Sizes s(layer, tokens);
  const double nnz = std::min(activity.nnz_per_token, s.f);
  const double neurons = activity.union_share >= 0.0
                             ? std::min(activity.union_share, 1.0) * s.f
                             : ffn_costs::expected_union(layer, 128, activity);
  return 1e3 * (2.0 * s.m * s.d * s.f * 1e-12 * gate_ms_per_teraflop +
                8.0 * 2.0 * s.m * neurons * s.d * 1e-12 * union_ms_per_teraflop +
                memory_slower(layer.device) *
                    (s.m * std::min(nnz, kFew) * 1e-9 * kMsPerGigapair +
                     s.m * std::max(nnz - kFew, 0.0) * 1e-9 * kMsPerGigapairBeyond) +
                std::ceil(s.m / kChunk) * kMsPerChunk);
}

// A hybrid cost must be below this share of the dense cost: estimates are off by up to 7%.
constexpr double kHybridShare = 0.95;

// Its kernels count like those of tile-union.
constexpr GpuFfnLimits kHybridLimits = {
    .activations = activation_set(Activation::kRelu, Activation::kRelu2, Activation::kFatRelu,
                                  Activation::kDRelu),
    .most_width = 131072,
    .most_ffn = 524288,
    .most_weights = (int64_t{1} << 35) - 1};

}  // namespace

std::string gpu_ffn_train_unsupported(FfnTrainExecution execution, const GpuFfnLayer& layer,
                                      bool portable) {
  if (execution == FfnTrainExecution::kDense) return "";
  if (layer.biased) return "layers with biases train dense";
  if (layer.ffn % 8 != 0) return fmt::format("an FFN size of {} is no multiple of 8", layer.ffn);
  GpuFfnLimits limits = kHybridLimits;
  if (portable || layer.device.compute_capability != 90) {
    limits.least_capability = 80;
    limits.most_capability = std::numeric_limits<int>::max();
    limits.most_ffn = 131072;  // a bit per neuron in 99 KiB of shared memory
  }
  return gpu_ffn_outside(limits, layer);
}

FfnTrainExecution choose_gpu_ffn_train(const GpuFfnLayer& layer, int64_t tokens,
                                       FfnTrainPolicy policy, const LayerActivity& activity) {
  constexpr FfnTrainExecution kDense = FfnTrainExecution::kDense;
  constexpr FfnTrainExecution kHybrid = FfnTrainExecution::kHybrid;
  if (policy == FfnTrainPolicy::kDense || !gpu_ffn_train_unsupported(kHybrid, layer).empty()) {
    return kDense;
  }
  if (policy == FfnTrainPolicy::kHybrid) return kHybrid;
  if (activity.nnz_per_token < 0.0) return kDense;
  const double dense = dense_train_cost(layer, tokens);
  return hybrid_train_cost(layer, tokens, activity) < kHybridShare * dense ? kHybrid : kDense;
}

}  // namespace twell
