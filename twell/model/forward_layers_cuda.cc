// SPDX-License-Identifier: Apache-2.0
// The layers of a forward by each path of ops/route: op by op, as few kernels, as one.
#include "twell/base/profile_range.h"
#include "twell/model/forward_cuda.h"
#include "twell/model/qkv.h"
#include "twell/ops/bias/bias_cuda.h"
#include "twell/ops/matmul/byte_linear_cuda.h"
#include "twell/ops/matmul/linear_cuda.h"
#include "twell/ops/qkv/qkv_cuda.h"
#include "twell/ops/rms_norm/rms_norm_cuda.h"
#include "twell/ops/rope/rope_cuda.h"
#include "twell/ops/skinny/batch_ops.h"

namespace twell {

layer_ops::Qkv ForwardCuda::cached_qkv(int64_t layer, const __nv_bfloat16* x,
                                       const BF16* norm) const {
  const BatchArrays batch = batch_.device(staged_.tokens, staged_.sequences);
  const LayerMatrices<const BF16>& w = model_.weights().layers[static_cast<size_t>(layer)];
  const NewRows to = new_rows(layer);
  return {.input = {.tokens = staged_.tokens,
                    .width = config_.width,
                    .x = x,
                    .norm = device_bf16(norm),
                    .eps = config_.stream_eps(),
                    .constant_weights = true,
                    .x_bytes = bytes()},
          .heads = config_.heads,
          .kv_heads = config_.kv_heads,
          .head_dim = config_.head_dim,
          .w = device_bf16(w.w_qkv.data),
          .bias = device_bf16(w.b_qkv),
          .cos = cos_.data(),
          .sin = sin_.data(),
          .positions = batch.positions,
          .cache_rows = to.rows,
          .q = qkv_.data(),
          .q_stride = qkv_width(config_),
          .keys = to.keys,
          .values = to.values,
          .w_bytes = bytes_of(layer).qkv};
}

void ForwardCuda::project(int64_t layer) {
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
                      .x = normed(),
                      .w = device_bf16(w.w_qkv.data),
                      .rope = rope,
                      .x_bytes = bytes(),
                      .w_bytes = bytes_of(layer).qkv};
  if (!config_.qk_norm && qkv_is_fused(ctx_, fused)) {
    qkv_cuda(ctx_, fused);
    return;
  }
  const bool few = model_.in_bytes() ? takes_few_bytes() : ctx_.compute_capability() == 90;
  if (few && staged_.cache != nullptr && !config_.qk_norm) {
    const layer_ops::Qkv problem = cached_qkv(layer, normed(), nullptr);
    if (batch_ops::takes(problem)) {
      TWELL_CUDA_CHECK(batch_ops::launch_qkv(problem, ctx_.stream()));
      return;
    }
  }
  if (model_.in_bytes()) {
    byte_linear_cuda(ctx_, {.rows = padded_tokens(),
                            .cols = qkv_width(config_),
                            .inner = config_.width,
                            .x = bytes(),
                            .w = bytes_of(layer).qkv,
                            .y = qkv_.data()});
  } else {
    linear_cuda(ctx_, {.rows = padded_tokens(),
                       .cols = w.w_qkv.rows,
                       .inner = w.w_qkv.cols,
                       .x = hidden_.data(),
                       .w = device_bf16(w.w_qkv.data),
                       .y = qkv_.data(),
                       .constant_weights = true});
  }
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

void ForwardCuda::project_attended(int64_t layer) {
  const LayerMatrices<const BF16>& w = model_.weights().layers[static_cast<size_t>(layer)];
  if (model_.in_bytes()) {
    project_attended_bytes(layer);
  } else {
    linear_cuda(ctx_, {.rows = padded_tokens(),
                       .cols = config_.width,
                       .inner = config_.q_width(),
                       .x = attended_.data(),
                       .w = device_bf16(w.w_o.data),
                       .y = residual_.data(),
                       .add = true,
                       .constant_weights = true});
  }
  if (w.b_o == nullptr) return;
  TWELL_CUDA_CHECK(launch_bias_forward({.tokens = staged_.tokens,
                                        .width = config_.width,
                                        .bias = device_bf16(w.b_o),
                                        .x = residual_.data()},
                                       ctx_.stream()));
}

FfnWeightsCuda ForwardCuda::ffn_weights(int64_t layer) const {
  const auto& w = model_.weights().layers[static_cast<size_t>(layer)].ffn;
  const LayerBytesCuda in_bytes = bytes_of(layer);
  return {.w_gate = device_bf16(w.w_gate.data),
          .w_up = device_bf16(w.w_up.data),
          .w_down = device_bf16(w.w_down.data),
          .activation = config_.activation,
          .b_gate = device_bf16(w.b_gate),
          .b_up = device_bf16(w.b_up),
          .b_down = device_bf16(w.b_down),
          .screen = rotated_gate(layer),
          .threshold = threshold(),
          .gate_bytes = in_bytes.gate,
          .up_bytes = in_bytes.up,
          .down_bytes = in_bytes.down,
          .down_rows = down_rows(layer)};
}

void ForwardCuda::enqueue_layer(int64_t layer, int32_t* row_nnz, const ForwardHooksCuda& hooks) {
  const auto done = [&](ForwardStage stage) {
    if (hooks.after_stage) hooks.after_stage(stage);
  };
  const LayerMatrices<const BF16>& w = model_.weights().layers[static_cast<size_t>(layer)];
  const ProfileRange whole("layer", layer);
  ProfileRange stage("norm");
  norm_input(w.attention_norm);
  done(ForwardStage::kNorm);
  stage.next("qkv");
  project(layer);
  done(ForwardStage::kQkv);
  stage.next("attention");
  attention(layer);
  done(ForwardStage::kAttention);
  stage.next("output");
  project_attended(layer);
  done(ForwardStage::kOutput);
  stage.next("norm");
  FfnForwardCuda ffn{.tokens = staged_.tokens,
                     .rows = padded_tokens(),
                     .weights = ffn_weights(layer),
                     .x = normed(),
                     .y = residual_.data(),
                     .row_nnz = row_nnz == nullptr ? nullptr : row_nnz + layer * staged_.tokens,
                     .add = true,
                     .x_bytes = bytes(),
                     .rotated = {.values = rotated_hidden_.data(), .bounds = token_bounds_.data()}};
  // Whoever observes the layers expects rows in the order of the tokens.
  const bool in_order = !sorts_rows() || row_nnz != nullptr || hooks.ffn ||
                        !ffn_maps_rows(ffn, ffn_plans_[layer], ffn_);
  const BatchArrays batch = batch_.device(staged_.tokens, staged_.sequences);
  const int32_t* const rows = in_order ? nullptr : batch.rows;
  if (!in_order) ffn.y_rows = batch.row_tokens;
  if (ffn_reads_rotated(ffn, ffn_plans_[layer], ffn_)) {
    norm_rotated(w.ffn_norm, ffn, rows);
  } else {
    norm_input(w.ffn_norm, rows);
  }
  done(ForwardStage::kNorm);
  stage.next("ffn");
  if (hooks.ffn) {
    hooks.ffn(layer, ffn);
  } else {
    ffn_forward_cuda(ctx_, ffn, ffn_plans_[layer], ffn_);
  }
  done(ForwardStage::kFfn);
}

void ForwardCuda::enqueue_few_tokens_layer(int64_t layer) {
  const LayerMatrices<const BF16>& w = model_.weights().layers[static_cast<size_t>(layer)];
  const float eps = config_.stream_eps();
  const ProfileRange whole("layer", layer);
  ProfileRange stage("norm, qkv");
  const layer_ops::Qkv normed = cached_qkv(layer, hidden_.data(), nullptr);
  const bool batch = route::norm_apart(staged_.tokens) && batch_ops::takes(normed);
  if (batch) {
    norm(w.attention_norm);
    TWELL_CUDA_CHECK(batch_ops::launch_qkv(normed, ctx_.stream()));
  } else {
    TWELL_CUDA_CHECK(layer_ops::launch_qkv(cached_qkv(layer, residual_.data(), w.attention_norm),
                                           ctx_.stream()));
  }
  stage.next("attention");
  attention(layer);
  stage.next("output");
  const layer_ops::Linear output{.input = {.tokens = staged_.tokens,
                                           .width = config_.q_width(),
                                           .x = attended_.data(),
                                           .constant_weights = true},
                                 .cols = config_.width,
                                 .w = device_bf16(w.w_o.data),
                                 .residual = residual_.data(),
                                 .y = residual_.data()};
  TWELL_CUDA_CHECK(batch ? batch_ops::launch_linear(output, ctx_.stream())
                         : layer_ops::launch_linear(output, ctx_.stream()));
  stage.next("norm, ffn");
  ffn_forward_cuda(ctx_,
                   {.tokens = staged_.tokens,
                    .weights = ffn_weights(layer),
                    .x = residual_.data(),
                    .y = residual_.data(),
                    .norm = device_bf16(w.ffn_norm),
                    .eps = eps,
                    .add = true},
                   ffn_plans_[layer], ffn_);
}

void ForwardCuda::set_decode_bytes(int64_t layer, DecodeLayers& problem) const {
  const LayerBytesCuda& w = model_.layer_bytes(layer);
  DecodeLayer& to = problem.layer[layer];
  to.w_qkv = w.qkv.values;
  to.w_o = w.o.values;
  to.w_gate = w.gate.values;
  to.w_up = w.up.values;
  to.w_down = down_rows(layer);
  DecodeLayerBytes& bytes = problem.bytes[layer];
  bytes.qkv_scales = w.qkv.scales;
  bytes.o_scales = w.o.scales;
  bytes.gate_scales = w.gate.scales;
  bytes.up_scales = w.up.scales;
  bytes.down_scales = w.down.scales;
}

void ForwardCuda::enqueue_decode_layers(const ForwardHooksCuda& hooks) {
  const ProfileRange whole("all layers as one kernel");
  const BatchArrays batch = batch_.device(staged_.tokens, staged_.sequences);
  DecodeLayers problem{.tokens = static_cast<int>(staged_.tokens),
                       .layers = static_cast<int>(config_.layers),
                       .width = static_cast<int>(config_.width),
                       .ffn = static_cast<int>(config_.ffn),
                       .heads = static_cast<int>(config_.heads),
                       .kv_heads = static_cast<int>(config_.kv_heads),
                       .head_dim = static_cast<int>(config_.head_dim),
                       .eps = config_.stream_eps(),
                       .cos = cos_.data(),
                       .sin = sin_.data(),
                       .positions = batch.positions,
                       .cache_rows = batch.cache_rows,
                       .tables = staged_.cache->tables(),
                       .kv_begin = batch.kv_begin,
                       .kv_len = batch.kv_len,
                       .x = residual_.data(),
                       .workspace = decode_workspace(decode_shape_, decode_memory_.data()),
                       .weights_in_bytes = model_.in_bytes(),
                       .cache_in_bytes = eight_bits(),
                       .sparse_requests = route::sparse_requests(read_layer_bytes())};
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    const LayerMatrices<const BF16>& w = model_.weights().layers[static_cast<size_t>(layer)];
    const GpuFfnChoice choice =
        choose_ffn_cuda(ffn_layer_, {.tokens = staged_.tokens}, ffn_plans_[layer]);
    problem.layer[layer] = {.attention_norm = device_bf16(w.attention_norm),
                            .w_qkv = device_bf16(w.w_qkv.data),
                            .b_qkv = device_bf16(w.b_qkv),
                            .w_o = device_bf16(w.w_o.data),
                            .ffn_norm = device_bf16(w.ffn_norm),
                            .w_gate = device_bf16(w.ffn.w_gate.data),
                            .w_up = device_bf16(w.ffn.w_up.data),
                            .w_down = device_bf16(w.ffn.w_down.data),
                            .keys = staged_.cache->keys(layer),
                            .values = staged_.cache->values(layer),
                            .activity = ffn_plans_[layer].counts,
                            .sparse = choice.execution->sparse};
    if (eight_bits()) {
      problem.bytes[layer].keys = staged_.cache->key_bytes(layer);
      problem.bytes[layer].values = staged_.cache->value_bytes(layer);
    }
    if (model_.in_bytes()) set_decode_bytes(layer, problem);
    if (screen_errors_.size() > 0 &&
        (hooks.one_kernel ||
         route::gate_screen_pays(ffn_plans_[layer].activity.nnz_per_token, config_.ffn))) {
      problem.layer[layer].screen = {
          .rows = screen_rows_.data() + layer * config_.ffn * screen_row_bytes(config_.width),
          .errors = screen_errors_.data() + layer * config_.ffn};
    }
  }
  TWELL_CUDA_CHECK(launch_decode_layers_sm90(problem, ctx_.stream()));
}

}  // namespace twell
