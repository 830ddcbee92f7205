// SPDX-License-Identifier: Apache-2.0
#include "twell/model/layer_dump_cuda.h"

#include <utility>

#include "twell/base/error.h"
#include "twell/model/forward_cuda.h"
#include "twell/model/qkv.h"
#include "twell/ops/matmul/linear_cuda.h"

namespace twell {
namespace {

// bf16 [M, stride] in device memory, of which the first `cols` columns are wanted.
std::vector<float> fetch(const CudaContext& ctx, const __nv_bfloat16* values, int64_t tokens,
                         int64_t stride, int64_t cols) {
  std::vector<BF16> host(static_cast<size_t>(tokens * stride));
  TWELL_CUDA_CHECK(cudaMemcpyAsync(host.data(), values, host.size() * sizeof(BF16),
                                   cudaMemcpyDeviceToHost, ctx.stream()));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
  std::vector<float> wanted;
  wanted.reserve(static_cast<size_t>(tokens * cols));
  for (int64_t row = 0; row < tokens; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      wanted.push_back(to_float(host[static_cast<size_t>(row * stride + col)]));
    }
  }
  return wanted;
}

// The pass over the layers: copies what the forward's buffers hold after each stage.
class Dumping {
 public:
  Dumping(CudaContext& ctx, const ModelCuda& model, std::span<const int32_t> ids, int64_t layer,
          FfnPolicy policy)
      : ctx_(ctx),
        model_(model),
        config_(model.padded_config()),
        ids_(ids),
        layer_(layer),
        forward_(ctx, model,
                 {.max_tokens = std::ssize(ids),
                  .max_sequences = 1,
                  .max_length = std::ssize(ids),
                  .ffn = policy}) {}

  LayerDump run() {
    ForwardHooksCuda hooks;
    hooks.after_stage = [this](ForwardStage stage) { after(stage); };
    hooks.ffn = [this](int64_t layer, const FfnForwardCuda& problem) { ffn(layer, problem); };
    const ForwardSequence sequence{.tokens = std::ssize(ids_)};
    forward_.run(ids_, {&sequence, 1}, nullptr, nullptr, hooks);
    dump_.execution = forward_.ffn_plans()[layer_].plan.execution.name;
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
    return std::move(dump_);
  }

 private:
  void keep(const char* name, const __nv_bfloat16* values, int64_t cols) {
    dump_.stages.push_back({name, cols, fetch(ctx_, values, std::ssize(ids_), cols, cols)});
  }

  void after(ForwardStage stage) {
    if (at_ == layer_) keep_stage(stage);
    if (stage == ForwardStage::kFfn) ++at_;
  }

  void keep_stage(ForwardStage stage) {
    const ForwardBuffersCuda buffers = forward_.buffers();
    switch (stage) {
      case ForwardStage::kEmbedding:
        break;
      case ForwardStage::kNorm:
        if (attended_) {
          keep("ffn_norm", buffers.hidden, config_.width);
          keep_hidden(buffers.hidden);
        } else {
          keep("input", buffers.residual, config_.width);
          keep("attention_norm", buffers.hidden, config_.width);
        }
        break;
      case ForwardStage::kQkv:
        keep("qkv", buffers.qkv, qkv_width(config_));
        break;
      case ForwardStage::kAttention:
        keep("attention", buffers.attended, config_.q_width());
        attended_ = true;
        break;
      case ForwardStage::kOutput:
        keep("after_attention", buffers.residual, config_.width);
        break;
      case ForwardStage::kFfn:
        keep("output", buffers.residual, config_.width);
        break;
    }
  }

  std::vector<float> projected(const __nv_bfloat16* x, const Matrix<const BF16>& w,
                               const BF16* bias) {
    const int64_t tokens = std::ssize(ids_);
    DeviceBuffer<__nv_bfloat16> y(tokens * w.rows);
    linear_cuda(ctx_, {.rows = tokens,
                       .cols = w.rows,
                       .inner = w.cols,
                       .x = x,
                       .w = device_bf16(w.data),
                       .y = y.data()});
    const int64_t ffn = model_.config().ffn;
    std::vector<float> values = fetch(ctx_, y.data(), tokens, w.rows, ffn);
    if (bias == nullptr) return values;
    const std::vector<float> added = fetch(ctx_, device_bf16(bias), 1, ffn, ffn);
    for (size_t i = 0; i < values.size(); ++i) values[i] += added[i % added.size()];
    return values;
  }

  void keep_hidden(const __nv_bfloat16* x) {
    const auto& w = model_.weights().layers[static_cast<size_t>(layer_)].ffn;
    const BlendedActivation activation{
        .kind = config_.activation, .threshold = static_cast<float>(config_.activation_threshold)};
    std::vector<float> gate;
    if (w.gated()) gate = projected(x, w.w_gate, w.b_gate);
    add_hidden_stages(activation, std::move(gate), projected(x, w.w_up, w.b_up),
                      model_.config().ffn, dump_);
  }

  // Runs the wanted layer twice: alone for y, then onto the residual stream.
  void ffn(int64_t layer, const FfnForwardCuda& problem) {
    FfnPlanCuda& plan = forward_.ffn_plans()[layer];
    if (layer == layer_) {
      DeviceBuffer<__nv_bfloat16> y(std::max(problem.rows, problem.tokens) * config_.width);
      FfnForwardCuda alone = problem;
      alone.y = y.data();
      alone.add = false;
      ffn_forward_cuda(ctx_, alone, plan, forward_.ffn_workspace());
      keep("ffn", y.data(), config_.width);
    }
    ffn_forward_cuda(ctx_, problem, plan, forward_.ffn_workspace());
  }

  CudaContext& ctx_;
  const ModelCuda& model_;
  const ModelConfig& config_;
  std::span<const int32_t> ids_;
  int64_t layer_;
  ForwardCuda forward_;
  int64_t at_ = 0;         // the layer that the forward is in
  bool attended_ = false;  // the wanted layer's attention is over
  LayerDump dump_;
};

}  // namespace

LayerDump dump_layer_cuda(CudaContext& ctx, const ModelCuda& model, std::span<const int32_t> ids,
                          int64_t layer, FfnPolicy policy) {
  check_layer_dump(model.config(), ids, layer);
  TWELL_REQUIRE(!model.in_bytes(),
                "dump reads weights in bf16, and these are in 8 bits on the GPU: use "
                "--weights stored or --device cpu");
  return Dumping(ctx, model, ids, layer, policy).run();
}

}  // namespace twell
