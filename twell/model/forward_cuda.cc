// SPDX-License-Identifier: Apache-2.0
#include "twell/model/forward_cuda.h"

#include <algorithm>

#include "twell/base/profile_range.h"
#include "twell/base/rounding.h"
#include "twell/model/ffn_shape.h"
#include "twell/model/qkv.h"
#include "twell/model/rotary.h"
#include "twell/ops/attention/kv_bytes_cuda.h"
#include "twell/ops/embedding/embedding_cuda.h"
#include "twell/ops/matmul/linear_cuda.h"
#include "twell/ops/rms_norm/rms_norm_cuda.h"

namespace twell {
namespace {

using route::kRowStep;

// Number of bf16 values per token in the buffers of a forward.
int64_t values_per_token(const ModelConfig& config) {
  return 2 * config.width + qkv_width(config) + config.q_width();
}

// Bytes of an input of projections in e4m3.
int64_t byte_values(const ModelConfig& config, int64_t rows) {
  return rows * std::max(config.width, config.q_width());
}

ForwardPlanCuda checked(const CudaContext& ctx, const ModelCuda& model, ForwardPlanCuda plan) {
  const ModelConfig& config = model.padded_config();
  plan.weights_in_bytes = model.in_bytes();
  TWELL_CHECK(plan.max_tokens >= 1 && plan.max_sequences >= 1 && plan.max_length >= 1,
              "a forward planned for {} tokens in {} sequences of {}", plan.max_tokens,
              plan.max_sequences, plan.max_length);
  require_device_memory(ForwardCuda::bytes_needed(ctx, config, plan),
                        fmt::format("activations of {} tokens", plan.max_tokens));
  return plan;
}

// The model's properties on this device that its route needs. A policy that names an execution runs
// that one, and no kernel of all layers.
route::Layers route_layers(const CudaContext& ctx, const ModelConfig& config,
                           const ForwardPlanCuda& plan) {
  const FfnPolicy policy = plan.ffn;
  const GpuDevice device = gpu_device(ctx);
  const GpuFfnLayer ffn = gpu_ffn_layer(device, ffn_shape(config));
  const int64_t widest = std::max(config.width, config.q_width());
  route::Layers layers{
      .head_dim = config.head_dim,
      .relu = config.activation == Activation::kRelu,
      .biased = config.mlp_bias,
      .qk_norm = config.qk_norm,
      .o_bias = config.o_bias,
      .window = config.sliding_window,
      .norm_tokens = std::min(gpu_ffn_norm_tokens(ffn, policy), gpu_row_tokens(device, widest)),
      .in_bytes = plan.weights_in_bytes};
  if (policy.kind != FfnPolicy::Kind::kNamed) {
    layers.one_kernel_tokens = route::one_kernel_tokens(
        layers, config.layers, kMaxDecodeLayers,
        decode_layers_max_tokens(config.width, config.q_width(), config.ffn, config.head_dim,
                                 plan.weights_in_bytes));
  }
  return layers;
}

// For the kernel of all layers; tokens is 0 when the model or the device does not suit it.
DecodeWorkspaceShape decode_shape(const CudaContext& ctx, const ModelConfig& config,
                                  const ForwardPlanCuda& plan) {
  return {.multiprocessors = ctx.multiprocessors(),
          .tokens = std::min({plan.max_sequences, plan.max_tokens,
                              route_layers(ctx, config, plan).one_kernel_tokens}),
          .width = config.width,
          .heads = config.heads,
          .kv_heads = config.kv_heads,
          .head_dim = config.head_dim,
          .max_length = plan.max_length};
}

// Bytes of w_down with a row per neuron, for the kernel of all layers and for small batches.
int64_t down_row_bytes(const CudaContext& ctx, const ModelConfig& config,
                       const ForwardPlanCuda& plan) {
  if (!plan.weights_in_bytes) return 0;
  GpuFfnLayer layer = gpu_ffn_layer(gpu_device(ctx), ffn_shape(config));
  layer.weights = GpuWeights::kFp8;
  const bool small_batches =
      plan.ffn != FfnPolicy::kDense &&
      gpu_ffn_outside(find_gpu_ffn("small-batch-fp8")->limits, layer).empty();
  if (!small_batches && decode_shape(ctx, config, plan).tokens == 0) return 0;
  return config.layers * config.ffn * config.width;
}

}  // namespace

int64_t ForwardCuda::bytes_needed(const CudaContext& ctx, const ModelConfig& config,
                                  const ForwardPlanCuda& plan) {
  const int64_t rows = round_up(plan.max_tokens, kRowStep);
  return 2 * rows * values_per_token(config) +
         FfnWorkspaceCuda::bytes_needed(ctx, plan.max_tokens, config.ffn) +
         AttentionWorkspaceCuda::bytes_needed(plan.max_sequences, config.heads, config.head_dim,
                                              plan.max_length) +
         decode_workspace_bytes(decode_shape(ctx, config, plan)) +
         rotated_bytes(ctx, config, plan) + wide_bytes(config, plan) +
         down_row_bytes(ctx, config, plan) +
         (plan.weights_in_bytes
              ? byte_values(config, rows) + 4 * rows +
                    FfnWorkspaceCuda::bytes_for_bytes(ctx, plan.max_tokens, config.width,
                                                      config.ffn, config.gated)
              : 0) +
         4 * plan.max_length * config.head_dim;
}

ForwardCuda::ForwardCuda(CudaContext& ctx, const ModelCuda& model, const ForwardPlanCuda& plan)
    : ctx_(ctx),
      model_(model),
      config_(model.padded_config()),
      plan_(checked(ctx, model, plan)),
      batch_(plan.max_tokens, plan.max_sequences),
      attention_(plan.max_sequences, config_.heads, config_.head_dim, plan.max_length),
      ffn_(ctx, plan.max_tokens, config_.width, config_.ffn, config_.gated),
      ffn_plans_(ctx, config_.layers, config_.ffn, plan.ffn),
      decode_shape_(decode_shape(ctx, config_, plan_)),
      decode_memory_(decode_workspace_bytes(decode_shape_)),
      ffn_layer_(gpu_ffn_layer(gpu_device(ctx), ffn_shape(config_))),
      layers_(route_layers(ctx, config_, plan_)) {
  layers_.one_kernel_tokens = decode_shape_.tokens;
  if (decode_memory_.size() > 0) {
    TWELL_CUDA_CHECK(cudaMemsetAsync(decode_memory_.data(), 0,
                                     static_cast<size_t>(decode_memory_.size()), ctx.stream()));
  }
  const RopeTable table = rope_table(config_, plan.max_length);
  cos_ = to_device<float>(table.cos.span());
  sin_ = to_device<float>(table.sin.span());
  const int64_t rows = round_up(plan.max_tokens, kRowStep);
  residual_ = DeviceBuffer<__nv_bfloat16>(rows * config_.width);
  hidden_ = DeviceBuffer<__nv_bfloat16>(rows * config_.width);
  qkv_ = DeviceBuffer<__nv_bfloat16>(rows * qkv_width(config_));
  attended_ = DeviceBuffer<__nv_bfloat16>(rows * config_.q_width());
  if (plan_.weights_in_bytes) {
    bytes_.values = DeviceBuffer<uint8_t>(byte_values(config_, rows));
    bytes_.scales = DeviceBuffer<float>(rows);
    ffn_.make_for_bytes();
  }
  make_rotated_gates();
  make_wide_rows();
  make_down_rows();
}

void ForwardCuda::make_down_rows() {
  const int64_t size = config_.ffn * config_.width;
  down_rows_ = DeviceBuffer<uint8_t>(down_row_bytes(ctx_, config_, plan_));
  if (down_rows_.size() == 0) return;
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    TWELL_CUDA_CHECK(launch_transpose_bytes(model_.layer_bytes(layer).down.values, config_.width,
                                            config_.ffn, down_rows_.data() + layer * size,
                                            ctx_.stream()));
  }
}

int64_t ForwardCuda::screen_bytes(const CudaContext& ctx, const ModelConfig& c,
                                  const ForwardPlanCuda& plan) {
  // A gate in e4m3 is as small as its screen.
  if (plan.weights_in_bytes || plan.ffn == FfnPolicy::kDense ||
      decode_shape(ctx, c, plan).tokens == 0 ||
      !decode_layers_take_screens(c.width, c.q_width(), c.ffn, c.head_dim)) {
    return 0;
  }
  return c.layers * c.ffn * (screen_row_bytes(c.width) + static_cast<int64_t>(sizeof(float)));
}

int64_t ForwardCuda::padded_tokens() const { return route::padded_rows(staged_.tokens); }

void ForwardCuda::norm(const BF16* weight, const int32_t* rows, float scale) const {
  TWELL_CUDA_CHECK(launch_rms_norm({.tokens = staged_.tokens,
                                    .width = config_.width,
                                    .x = residual_.data(),
                                    .weight = device_bf16(weight),
                                    .y = hidden_.data(),
                                    .eps = config_.stream_eps(),
                                    .scale = scale,
                                    .y_rows = rows},
                                   ctx_.stream()));
}

void ForwardCuda::enqueue(int32_t* row_nnz, const ForwardHooksCuda& hooks) {
  const auto done = [&](ForwardStage stage) {
    if (hooks.after_stage) hooks.after_stage(stage);
  };
  const BatchArrays batch = batch_.device(staged_.tokens, staged_.sequences);
  const ModelMatrices<const BF16>& weights = model_.weights();
  const ProfileRange whole("forward, tokens:", staged_.tokens);
  TWELL_CUDA_CHECK(launch_embedding({.tokens = staged_.tokens,
                                     .width = config_.width,
                                     .ids = batch.ids,
                                     .table = device_bf16(weights.embedding.data),
                                     .out = residual_.data(),
                                     .drawn = staged_.drawn,
                                     .scale = config_.stream_embedding_scale()},
                                    ctx_.stream()));
  done(ForwardStage::kEmbedding);
  for (SequenceGroup& group : staged_.groups) {
    group.ragged = {};  // for this very batch
    if (group.widened) continue;
    const AttentionCuda first_layer = attention_of(0, group);
    group.ragged = attention_ragged(ctx_, first_layer, attention_);
    if (group.ragged.count == 0) continue;
    TWELL_CUDA_CHECK(launch_kv_clear_behind({.sequences = group.count,
                                             .layers = config_.layers,
                                             .layer_size = staged_.cache->layer_size(),
                                             .width = config_.kv_width(),
                                             .kv_len = first_layer.sequences.kv_len,
                                             .kv_begin = first_layer.sequences.kv_begin,
                                             .tables = first_layer.sequences.tables,
                                             .v = staged_.cache->values(0)},
                                            ctx_.stream()));
  }
  const bool observed = row_nnz != nullptr || hooks.ffn || hooks.after_stage;
  const route::LayersPath path = choose_path(observed, hooks.one_kernel);
  if (path == route::LayersPath::kOneKernel) {
    enqueue_decode_layers(hooks);
  } else {
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      if (path == route::LayersPath::kFewKernels) {
        enqueue_few_tokens_layer(layer);
      } else {
        enqueue_layer(layer, row_nnz, hooks);
      }
    }
  }
  norm(weights.final_norm, nullptr, config_.hidden_scale());
  done(ForwardStage::kNorm);
}

route::Batch ForwardCuda::staged_batch(bool observed, bool one_kernel) const {
  return {.tokens = staged_.tokens,
          .cached = staged_.cache != nullptr,
          .observed = observed,
          .most_new = staged_.max_q_len,
          .most_keys = staged_.max_kv_len,
          .one_kernel = one_kernel,
          .repeats = staged_.repeats};
}

void ForwardCuda::find_sparse_layers() {
  if (plans_revision_ == ffn_plans_.revision()) return;
  plans_revision_ = ffn_plans_.revision();
  // Whether it is true of most layers.
  const auto most = [&](int64_t tokens, const auto& is) {
    int64_t count = 0;
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      const FfnPlanCuda& of = ffn_plans_[layer];
      const GpuFfnCall call{.tokens = tokens, .policy = of.plan.policy};
      count += is(*choose_gpu_ffn(ffn_layer_, call, of.activity).execution, of.activity);
    }
    return 2 * count > config_.layers;
  };
  layers_.sparse =
      most(route::kSparseProbeTokens,
           [](const GpuFfnExecution& execution, const LayerActivity&) { return execution.sparse; });
  layers_.stream_tokens = 0;
  for (int64_t tokens = route::kMostStreamProbed; tokens >= 1; --tokens) {
    const bool streams =
        most(tokens, [&](const GpuFfnExecution& execution, const LayerActivity& activity) {
          if (execution.name != "row-stream") return false;
          const double rows = find_gpu_ffn("decode-rows")->cost(ffn_layer_, tokens, activity);
          const bool screened =
              tokens == 1 && route::gate_screen_pays(activity.nnz_per_token, config_.ffn);
          return route::stream_pays(rows, execution.cost(ffn_layer_, tokens, activity), screened,
                                    tokens, read_layer_bytes());
        });
    if (!streams) break;
    layers_.stream_tokens = tokens;
  }
}

int64_t ForwardCuda::read_layer_bytes() const {
  const int64_t attention = 2 * (config_.q_width() + config_.kv_width());
  const int64_t value = model_.in_bytes() ? 1 : int64_t{sizeof(BF16)};
  return (attention + config_.ffn) * config_.width * value;
}

route::LayersPath ForwardCuda::choose_path(bool observed, bool one_kernel) const {
  return route::layers_path(layers_, staged_batch(observed, one_kernel));
}

route::LayersPath ForwardCuda::path() const { return choose_path(false, false); }

void ForwardCuda::run(std::span<const int32_t> ids, std::span<const ForwardSequence> sequences,
                      KvCacheCuda* cache, int32_t* row_nnz, const ForwardHooksCuda& hooks) {
  stage(ids, sequences, cache);
  enqueue(row_nnz, hooks);
}

void ForwardCuda::logits(const __nv_bfloat16* hidden, int64_t rows, float* out) const {
  const ProfileRange whole("logits");
  if (!model_.head_bytes().empty()) {
    logits_of_bytes(hidden, rows, out);
    return;
  }
  const Matrix<const BF16>& head = model_.weights().head;
  linear_cuda(ctx_, {.rows = rows,
                     .cols = head.rows,
                     .inner = head.cols,
                     .x = hidden,
                     .w = device_bf16(head.data),
                     .y = out,
                     .f32_out = true,
                     .constant_weights = true});
}

}  // namespace twell
