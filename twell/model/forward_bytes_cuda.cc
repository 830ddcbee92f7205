// SPDX-License-Identifier: Apache-2.0
// The layers of a forward whose projections are in e4m3. Every input of a projection is quantised
// per token: by the norm in front of it, or, for the output projection, by a pass over what the
// heads attended to. Keys, values and the residual stream stay in bf16.
#include <algorithm>

#include "twell/base/profile_range.h"
#include "twell/model/forward_cuda.h"
#include "twell/model/qkv.h"
#include "twell/ops/bias/bias_cuda.h"
#include "twell/ops/matmul/byte_linear_cuda.h"
#include "twell/ops/qkv/qkv_cuda.h"
#include "twell/ops/rms_norm/rms_norm_cuda.h"
#include "twell/ops/rope/rope_cuda.h"
#include "twell/ops/skinny/batch_ops.h"

namespace twell {

void ForwardCuda::norm_bytes(const BF16* weight, const int32_t* rows) const {
  TWELL_CUDA_CHECK(launch_rms_norm_bytes({.norm = {.tokens = staged_.tokens,
                                                   .width = config_.width,
                                                   .x = residual_.data(),
                                                   .weight = device_bf16(weight),
                                                   .eps = config_.stream_eps(),
                                                   .y_rows = rows},
                                          .values = bytes_.values.data(),
                                          .scales = bytes_.scales.data()},
                                         ctx_.stream()));
}

void ForwardCuda::project_bytes(int64_t layer) {
  const BatchArrays batch = batch_.device(staged_.tokens, staged_.sequences);
  const LayerMatrices<const BF16>& w = model_.weights().layers[static_cast<size_t>(layer)];
  const NewRows to = new_rows(layer);
  const RopeCuda rope{.tokens = staged_.tokens,
                      .heads = config_.heads,
                      .kv_heads = config_.kv_heads,
                      .head_dim = config_.head_dim,
                      .cos = cos_.data(),
                      .sin = sin_.data(),
                      .positions = batch.positions,
                      .bias = config_.qk_norm ? nullptr : device_bf16(w.b_qkv),
                      .qkv = qkv_.data(),
                      .keys = to.keys,
                      .values = to.values,
                      .cache_rows = to.rows};
  const QkvCuda fused{.width = config_.width,
                      .rope = rope,
                      .x_bytes = bytes(),
                      .w_bytes = model_.layer_bytes(layer).qkv};
  if (!config_.qk_norm && qkv_is_fused(ctx_, fused)) {
    qkv_cuda(ctx_, fused);
    return;
  }
  if (takes_few_bytes() && staged_.cache != nullptr && !config_.qk_norm) {
    layer_ops::Qkv problem = cached_qkv(layer, nullptr, nullptr);
    problem.input.x_bytes = bytes();
    problem.w_bytes = model_.layer_bytes(layer).qkv;
    if (batch_ops::takes(problem)) {
      TWELL_CUDA_CHECK(batch_ops::launch_qkv(problem, ctx_.stream()));
      return;
    }
  }
  byte_linear_cuda(ctx_, {.rows = padded_tokens(),
                          .cols = qkv_width(config_),
                          .inner = config_.width,
                          .x = bytes(),
                          .w = model_.layer_bytes(layer).qkv,
                          .y = qkv_.data()});
  if (config_.qk_norm) {
    TWELL_CUDA_CHECK(launch_head_norm({.tokens = staged_.tokens,
                                       .heads = config_.heads,
                                       .kv_heads = config_.kv_heads,
                                       .head_dim = config_.head_dim,
                                       .bias = device_bf16(w.b_qkv),
                                       .q_norm = device_bf16(w.q_norm),
                                       .k_norm = device_bf16(w.k_norm),
                                       .qkv = qkv_.data(),
                                       .eps = config_.stream_eps()},
                                      ctx_.stream()));
  }
  TWELL_CUDA_CHECK(launch_rope(rope, ctx_.stream()));
}

// Up to 64 tokens have kernels that read the weights at memory speed.
bool ForwardCuda::takes_few_bytes() const { return staged_.tokens <= batch_ops::kMaxTokens; }

void ForwardCuda::add_product_bytes(const ByteRowsCuda& w, int64_t inner) {
  if (takes_few_bytes()) {
    TWELL_CUDA_CHECK(batch_ops::launch_linear({.input = {.tokens = staged_.tokens,
                                                         .width = inner,
                                                         .constant_weights = true,
                                                         .x_bytes = bytes()},
                                               .cols = config_.width,
                                               .residual = residual_.data(),
                                               .y = residual_.data(),
                                               .w_bytes = w},
                                              ctx_.stream()));
    return;
  }
  byte_linear_cuda(ctx_, {.rows = padded_tokens(),
                          .cols = config_.width,
                          .inner = inner,
                          .x = bytes(),
                          .w = w,
                          .y = residual_.data(),
                          .add = true});
}

void ForwardCuda::logits_of_bytes(const __nv_bfloat16* hidden, int64_t rows, float* out) const {
  const int64_t width = config_.width, vocab = config_.vocab_size;
  const int64_t most = std::min(batch_ops::kMaxTokens, bytes_.scales.size());
  for (int64_t row = 0; row < rows; row += most) {
    const int64_t count = std::min(most, rows - row);
    TWELL_CUDA_CHECK(launch_quantise_rows({.rows = count,
                                           .cols = width,
                                           .x = hidden + row * width,
                                           .values = bytes_.values.data(),
                                           .scales = bytes_.scales.data()},
                                          ctx_.stream()));
    TWELL_CUDA_CHECK(batch_ops::launch_linear(
        {.input = {.tokens = count, .width = width, .constant_weights = true, .x_bytes = bytes()},
         .cols = vocab,
         .y = out + row * vocab,
         .f32_out = true,
         .w_bytes = model_.head_bytes()},
        ctx_.stream()));
  }
}

void ForwardCuda::enqueue_byte_layer(int64_t layer, int32_t* row_nnz,
                                     const ForwardHooksCuda& hooks) {
  const auto done = [&](ForwardStage stage) {
    if (hooks.after_stage) hooks.after_stage(stage);
  };
  const LayerMatrices<const BF16>& w = model_.weights().layers[static_cast<size_t>(layer)];
  const LayerBytesCuda& bytes_of_layer = model_.layer_bytes(layer);
  const ProfileRange whole("layer", layer);
  ProfileRange stage("norm");
  norm_bytes(w.attention_norm);
  done(ForwardStage::kNorm);
  stage.next("qkv");
  project_bytes(layer);
  done(ForwardStage::kQkv);
  stage.next("attention");
  attention(layer);
  done(ForwardStage::kAttention);
  stage.next("output");
  TWELL_CUDA_CHECK(launch_quantise_rows({.rows = staged_.tokens,
                                         .cols = config_.q_width(),
                                         .x = attended_.data(),
                                         .values = bytes_.values.data(),
                                         .scales = bytes_.scales.data()},
                                        ctx_.stream()));
  add_product_bytes(bytes_of_layer.o, config_.q_width());
  if (w.b_o != nullptr) {
    TWELL_CUDA_CHECK(launch_bias_forward({.tokens = staged_.tokens,
                                          .width = config_.width,
                                          .bias = device_bf16(w.b_o),
                                          .x = residual_.data()},
                                         ctx_.stream()));
  }
  done(ForwardStage::kOutput);
  stage.next("norm");
  FfnForwardCuda ffn{.tokens = staged_.tokens,
                     .rows = padded_tokens(),
                     .weights = {.activation = config_.activation,
                                 .threshold = threshold(),
                                 .gate_bytes = bytes_of_layer.gate,
                                 .up_bytes = bytes_of_layer.up,
                                 .down_bytes = bytes_of_layer.down,
                                 .down_rows = down_rows(layer)},
                     .y = residual_.data(),
                     .row_nnz = row_nnz == nullptr ? nullptr : row_nnz + layer * staged_.tokens,
                     .add = true,
                     .x_bytes = bytes()};
  // Whoever observes the layers expects rows in the order of the tokens.
  const bool in_order = !sorts_rows() || row_nnz != nullptr || hooks.ffn ||
                        !ffn_maps_rows(ffn, ffn_plans_[layer], ffn_);
  const BatchArrays batch = batch_.device(staged_.tokens, staged_.sequences);
  if (!in_order) ffn.y_rows = batch.row_tokens;
  norm_bytes(w.ffn_norm, in_order ? nullptr : batch.rows);
  done(ForwardStage::kNorm);
  stage.next("ffn");
  if (hooks.ffn) {
    hooks.ffn(layer, ffn);
  } else {
    ffn_forward_cuda(ctx_, ffn, ffn_plans_[layer], ffn_);
  }
  done(ForwardStage::kFfn);
}

}  // namespace twell
