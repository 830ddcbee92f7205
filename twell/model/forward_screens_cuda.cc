// SPDX-License-Identifier: Apache-2.0
// 8-bit copies of the gates that a forward makes: rotated ones for prompts (ops/ffn/screened), and
// screens for decoding one sequence (ops/decode).
#include <algorithm>
#include <optional>

#include "twell/base/rounding.h"
#include "twell/model/ffn_shape.h"
#include "twell/model/forward_cuda.h"
#include "twell/ops/ffn/screened/rotated_screen_cuda.h"

namespace twell {
namespace {

constexpr int64_t kScreenTile = 256;  // gates' spreads are padded to a multiple of this

// The bound of the 8-bit gates that the policy asks for; none where no call of the forward is taken
// by an execution with screens.
std::optional<ScreenBound> screen_bound(const CudaContext& ctx, const ModelConfig& config,
                                        const ForwardPlanCuda& plan) {
  if (plan.ffn != FfnPolicy::kScreened && plan.ffn != FfnPolicy::kScreenedStrict) return {};
  if (plan.weights_in_bytes) return {};  // the gate is in 8 bits itself
  GpuFfnLayer layer = gpu_ffn_layer(gpu_device(ctx), ffn_shape(config));
  layer.screen =
      plan.ffn == FfnPolicy::kScreened ? ScreenBound::kProbabilistic : ScreenBound::kStrict;
  const bool taken = std::ranges::any_of(gpu_ffn_registry(), [&](const GpuFfnExecution& row) {
    return row.limits.screened &&
           gpu_ffn_unsupported(row, layer, {.tokens = plan.max_tokens}).empty();
  });
  return taken ? layer.screen : std::nullopt;
}

}  // namespace

int64_t ForwardCuda::rotated_bytes(const CudaContext& ctx, const ModelConfig& config,
                                   const ForwardPlanCuda& plan) {
  if (!screen_bound(ctx, config, plan)) return 0;
  return config.layers * (config.ffn * config.width + 4 * round_up(config.ffn, kScreenTile) + 4) +
         plan.max_tokens * (config.width + static_cast<int64_t>(sizeof(TokenBound)));
}

void ForwardCuda::make_rotated_gates() {
  screen_bound_ = screen_bound(ctx_, config_, plan_);
  if (!screen_bound_) return;
  const int64_t spreads = round_up(config_.ffn, kScreenTile);
  rotated_gates_ = DeviceBuffer<int8_t>(config_.layers * config_.ffn * config_.width);
  gate_spreads_ = DeviceBuffer<int32_t>(config_.layers * spreads);
  gate_roundings_ = DeviceBuffer<float>(config_.layers);
  rotated_hidden_ = DeviceBuffer<int8_t>(plan_.max_tokens * config_.width);
  token_bounds_ = DeviceBuffer<TokenBound>(plan_.max_tokens);
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    const LayerMatrices<const BF16>& w = model_.weights().layers[static_cast<size_t>(layer)];
    TWELL_CUDA_CHECK(
        launch_rotate_gate({.neurons = config_.ffn,
                            .width = config_.width,
                            .w_gate = device_bf16(w.ffn.w_gate.data),
                            .values = rotated_gates_.data() + layer * config_.ffn * config_.width,
                            .spread = gate_spreads_.data() + layer * spreads,
                            .rounding = gate_roundings_.data() + layer,
                            .bound = *screen_bound_},
                           ctx_.stream()));
  }
}

RotatedGateCuda ForwardCuda::rotated_gate(int64_t layer) const {
  if (!screen_bound_) return {};
  return {.values = rotated_gates_.data() + layer * config_.ffn * config_.width,
          .spread = gate_spreads_.data() + layer * round_up(config_.ffn, kScreenTile),
          .rounding = gate_roundings_.data() + layer,
          .bound = *screen_bound_};
}

void ForwardCuda::norm_rotated(const BF16* weight, const FfnForwardCuda& ffn,
                               const int32_t* rows) const {
  TWELL_CUDA_CHECK(launch_rotate_norm({.norm = {.tokens = staged_.tokens,
                                                .width = config_.width,
                                                .x = residual_.data(),
                                                .weight = device_bf16(weight),
                                                .y = hidden_.data(),
                                                .eps = config_.stream_eps(),
                                                .y_rows = rows},
                                       .rotated = ffn.rotated,
                                       .rounding = ffn.weights.screen.rounding,
                                       .bound = ffn.weights.screen.bound},
                                      ctx_.stream()));
}

bool ForwardCuda::make_screens() {
  const ModelConfig& c = config_;
  const int64_t bytes = screen_bytes(ctx_, c, plan_);
  size_t free = 0, total = 0;
  TWELL_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  if (bytes == 0 || 2 * bytes > static_cast<int64_t>(free)) return false;
  const int64_t neurons = c.layers * c.ffn, row_bytes = screen_row_bytes(c.width);
  screen_rows_ = DeviceBuffer<uint8_t>(neurons * row_bytes);
  screen_errors_ = DeviceBuffer<float>(neurons);
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    const LayerMatrices<const BF16>& w = model_.weights().layers[static_cast<size_t>(layer)];
    TWELL_CUDA_CHECK(
        launch_make_gate_screen({.neurons = c.ffn,
                                 .width = c.width,
                                 .weight = device_bf16(w.ffn.firing().data),
                                 .norm = device_bf16(w.ffn_norm),
                                 .rows = screen_rows_.data() + layer * c.ffn * row_bytes,
                                 .errors = screen_errors_.data() + layer * c.ffn},
                                ctx_.stream()));
  }
  return true;
}

}  // namespace twell
