// SPDX-License-Identifier: Apache-2.0
#include "bench/pattern_replay_cuda.h"

#include <algorithm>

#include "twell/base/error.h"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"
#include "twell/ops/ffn/tile_union/tile_union_cuda.h"

namespace twell {

PatternsCuda::PatternsCuda(const std::filesystem::path& path, int64_t layers, int64_t ffn,
                           int64_t tokens)
    : layers_(layers) {
  const SafetensorsFile file(path);
  for (const int64_t layer : captured_layers(file)) {
    const FfnPattern pattern = captured_pattern(file, layer, ffn);
    packed_.push_back(pattern_to_device(repeated(pattern, 0, tokens), ffn, /*seed=*/5));
    nnz_per_token_.push_back(pattern.nnz_per_token());
    union_neurons_.push_back(mean_union(pattern));
  }
}

PatternReplayCuda::PatternReplayCuda(CudaContext& ctx, const std::filesystem::path& file,
                                     const ModelConfig& config, int64_t max_tokens)
    : ctx_(ctx),
      width_(config.width),
      ffn_(config.ffn),
      chunk_(FfnWorkspaceCuda::chunk_tokens(ctx, max_tokens, config.ffn)),
      gated_(config.gated),
      patterns_(file, config.layers, config.ffn, chunk_),
      made_(patterns_.of(0).shape),
      workspace_(chunk_, config.ffn) {}

void PatternReplayCuda::forward(int64_t layer, const FfnForwardCuda& problem,
                                const std::function<void(bool gate)>& done) {
  const bool bytes = problem.in_bytes(), portable = ctx_.compute_capability() != 90;
  TWELL_REQUIRE(!bytes || !portable, "weights in fp8 replay on Hopper alone");
  if (bytes && w_down_.size() == 0) {
    w_down_ = DeviceBuffer<uint8_t>((gated_ ? 1 : 2) * ffn_ * width_);
  }
  auto* const wide_down = reinterpret_cast<__nv_bfloat16*>(w_down_.data());
  const FfnWeightsCuda& weights = problem.weights;
  for (int64_t begin = 0; begin < problem.tokens; begin += chunk_) {
    const int64_t tokens = std::min(chunk_, problem.tokens - begin);
    const __nv_bfloat16* x = bytes ? nullptr : problem.x + begin * width_;
    ByteRowsCuda x_bytes;
    if (bytes) {
      x_bytes = {problem.x_bytes.values + begin * width_, problem.x_bytes.scales + begin};
      if (gated_ && weights.down_rows == nullptr) {
        TWELL_CUDA_CHECK(launch_transpose_bytes(weights.down_bytes.values, width_, ffn_,
                                                w_down_.data(), ctx_.stream()));
      } else if (!gated_) {
        TWELL_CUDA_CHECK(launch_widen_rows({.rows = width_,
                                            .cols = ffn_,
                                            .x = {weights.down_bytes.values, nullptr},
                                            .transposed = true,
                                            .out = wide_down},
                                           ctx_.stream()));
      }
    }
    TwellPacked made = made_.view(), replayed = patterns_.of(layer);
    made.shape.rows = replayed.shape.rows = tokens;
    const GateGemmCuda gate{
        .tokens = tokens,
        .width = width_,
        .ffn = ffn_,
        .x = x,
        .w_gate = gated_ ? problem.weights.w_gate : problem.weights.w_up,
        .out = made,
        .progress = gated_ && !portable ? workspace_.progress(tokens) : GateProgress{},
        .x_bytes = x_bytes,
        .w_gate_bytes = gated_ ? weights.gate_bytes : weights.up_bytes};
    portable ? gate_gemm_sm80_cuda(ctx_, gate) : gate_gemm_cuda(ctx_, gate);
    done(true);
    const SparseUpDownCuda rest{
        .tokens = tokens,
        .width = width_,
        .ffn = ffn_,
        .gate = replayed,
        .x = x,
        .w_up = gated_ ? problem.weights.w_up : nullptr,
        .w_down = bytes ? wide_down : weights.w_down,
        .y = problem.y + begin * width_,
        .add = problem.add,
        .squared = problem.weights.activation == Activation::kRelu2,
        .follows_gate = gated_ && !portable,
        .x_bytes = gated_ ? x_bytes : ByteRowsCuda{},
        .w_up_bytes = gated_ ? weights.up_bytes : ByteRowsCuda{},
        .y_scales = weights.down_bytes.scales,
        .w_down_bytes = weights.down_rows != nullptr ? weights.down_rows : w_down_.data()};
    portable ? portable_union_up_down_cuda(ctx_, rest, workspace_)
             : tile_union_up_down_cuda(ctx_, rest, workspace_);
    done(false);
  }
}

}  // namespace twell
