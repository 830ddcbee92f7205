// SPDX-License-Identifier: Apache-2.0
#include "twell/model/forward_cuda.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "twell/base/rounding.h"
#include "twell/model/ffn_shape.h"
#include "twell/model/qkv.h"
#include "twell/model/rotary.h"
#include "twell/model/token_rows.h"
#include "twell/ops/attention/kv_bytes_cuda.h"
#include "twell/ops/bias/bias_cuda.h"
#include "twell/ops/embedding/embedding_cuda.h"
#include "twell/ops/ffn/screened/rotated_screen_cuda.h"
#include "twell/ops/matmul/linear_cuda.h"
#include "twell/ops/qkv/qkv_cuda.h"
#include "twell/ops/rms_norm/rms_norm_cuda.h"
#include "twell/ops/rope/rope_cuda.h"
#include "twell/ops/skinny/batch_ops.h"

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
route::Layers route_layers(const CudaContext& ctx, const ModelConfig& config, FfnPolicy policy) {
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
      .norm_tokens = std::min(gpu_ffn_norm_tokens(ffn, policy), gpu_row_tokens(device, widest))};
  if (policy.kind != FfnPolicy::Kind::kNamed) {
    layers.one_kernel_tokens = route::one_kernel_tokens(
        layers, config.layers, kMaxDecodeLayers,
        decode_layers_max_tokens(config.width, config.q_width(), config.ffn, config.head_dim));
  }
  return layers;
}

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

int64_t rotated_bytes(const CudaContext& ctx, const ModelConfig& config,
                      const ForwardPlanCuda& plan) {
  if (!screen_bound(ctx, config, plan)) return 0;
  return config.layers * (config.ffn * config.width + 4 * round_up(config.ffn, kScreenTile) + 4) +
         plan.max_tokens * (config.width + static_cast<int64_t>(sizeof(TokenBound)));
}

// For the kernel of all layers; tokens is 0 when the model or the device does not suit it, or the
// cache or the weights are in 8 bits, which that kernel does not read.
DecodeWorkspaceShape decode_shape(const CudaContext& ctx, const ModelConfig& config,
                                  const ForwardPlanCuda& plan) {
  return {.multiprocessors = ctx.multiprocessors(),
          .tokens = plan.eight_bit_cache || plan.weights_in_bytes
                        ? 0
                        : std::min({plan.max_sequences, plan.max_tokens,
                                    route_layers(ctx, config, plan.ffn).one_kernel_tokens}),
          .width = config.width,
          .heads = config.heads,
          .kv_heads = config.kv_heads,
          .head_dim = config.head_dim,
          .max_length = plan.max_length};
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
         (plan.weights_in_bytes ? byte_values(config, rows) + 4 * rows +
                                      FfnWorkspaceCuda::bytes_for_bytes(ctx, plan.max_tokens,
                                                                        config.width, config.ffn)
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
      layers_(route_layers(ctx, config_, plan.ffn)) {
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
}

int64_t ForwardCuda::wide_blocks(const ForwardPlanCuda& plan) {
  if (!plan.eight_bit_cache) return 0;
  return 1 + ceil_div(plan.max_length, kKvBlock) + ceil_div(plan.max_tokens, kKvBlock);
}

int64_t ForwardCuda::wide_bytes(const ModelConfig& config, const ForwardPlanCuda& plan) {
  if (!plan.eight_bit_cache) return 0;
  return wide_blocks(plan) * (4 * kKvBlock * config.kv_width() + 4) + 8 * plan.max_tokens;
}

void ForwardCuda::make_wide_rows() {
  if (!plan_.eight_bit_cache) return;
  const int64_t blocks = wide_blocks(plan_), block_values = kKvBlock * config_.kv_width();
  wide_.blocks = blocks;
  wide_.keys = DeviceBuffer<__nv_bfloat16>(blocks * block_values);
  wide_.values = DeviceBuffer<__nv_bfloat16>(blocks * block_values);
  // Only block 0 is read behind the ends of sequences: other blocks that are read are written
  // whole.
  for (const DeviceBuffer<__nv_bfloat16>* part : {&wide_.keys, &wide_.values}) {
    TWELL_CUDA_CHECK(cudaMemsetAsync(
        part->data(), 0, static_cast<size_t>(block_values) * sizeof(__nv_bfloat16), ctx_.stream()));
  }
  std::vector<int32_t> table(static_cast<size_t>(blocks));
  std::iota(table.begin(), table.end(), 0);
  wide_.table = to_device<int32_t>(table);
  std::vector<int64_t> rows;
  for (int64_t token = 0; token < plan_.max_tokens; ++token) {
    rows.push_back(token * (qkv_width(config_) / config_.kv_width()));
  }
  wide_.qkv_rows = to_device<int64_t>(rows);
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

int64_t ForwardCuda::screen_bytes(const CudaContext& ctx, const ModelConfig& c,
                                  const ForwardPlanCuda& plan) {
  if (plan.ffn == FfnPolicy::kDense || decode_shape(ctx, c, plan).tokens == 0 ||
      !decode_layers_take_screens(c.width, c.q_width(), c.ffn, c.head_dim)) {
    return 0;
  }
  return c.layers * c.ffn * (screen_row_bytes(c.width) + static_cast<int64_t>(sizeof(float)));
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

void ForwardCuda::stage(std::span<const int32_t> ids, std::span<const ForwardSequence> sequences,
                        KvCacheCuda* cache, std::span<const float> uniforms, const int32_t* drawn) {
  TWELL_CHECK(uniforms.empty() || uniforms.size() == sequences.size(),
              "{} random numbers for {} sequences", uniforms.size(), sequences.size());
  TWELL_CHECK(cache == nullptr || cache->eight_bits() == plan_.eight_bit_cache,
              "a cache with 8 bits: {}, in a forward planned for one: {}",
              cache != nullptr && cache->eight_bits(), plan_.eight_bit_cache);
  const int64_t longest = longest_length(config_, sequences, cache);
  TWELL_CHECK(longest <= plan_.max_length, "a sequence of {} tokens in a forward planned for {}",
              longest, plan_.max_length);
  for (size_t m = 0; m < ids.size(); ++m) {
    const int32_t least = drawn == nullptr ? 0 : static_cast<int32_t>(-plan_.max_sequences);
    TWELL_CHECK(ids[m] >= least && ids[m] < config_.vocab_size,
                "token id {} at position {} is outside the vocabulary of {}", ids[m], m,
                config_.vocab_size);
  }
  staged_ = {.tokens = std::ssize(ids),
             .sequences = std::ssize(sequences),
             .cache = cache,
             .drawn = drawn};
  const BatchArrays host = batch_.host(staged_.tokens, staged_.sequences);
  std::copy(ids.begin(), ids.end(), host.ids);
  if (sorts_rows()) {
    const std::span<int32_t> rows(host.rows, ids.size());
    rows_by_id(ids, config_.vocab_size, rows);
    for (size_t m = 0; m < ids.size(); ++m) host.row_tokens[rows[m]] = static_cast<int32_t>(m);
  }
  staged_.uniform = cache == nullptr;
  int64_t row = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const auto [tokens, slot] = sequences[i];
    TWELL_CHECK(tokens >= 1 && row + tokens <= staged_.tokens,
                "sequence {} of {} tokens, {} of {} ids are left", i, tokens, staged_.tokens - row,
                staged_.tokens);
    const int64_t past = cache == nullptr ? 0 : cache->length(slot);
    host.q_begin[i] = static_cast<int32_t>(row);
    host.q_len[i] = static_cast<int32_t>(tokens);
    host.kv_len[i] = static_cast<int32_t>(past + tokens);
    host.kv_begin[i] = cache == nullptr ? row : cache->table_begin(slot);
    host.uniforms[i] = uniforms.empty() ? 0.0f : uniforms[i];
    for (int64_t t = 0; t < tokens; ++t, ++row) {
      host.positions[row] = static_cast<int32_t>(past + t);
      host.cache_rows[row] = cache == nullptr ? 0 : cache->row(slot, past + t);
    }
    staged_.max_q_len = std::max(staged_.max_q_len, tokens);
    staged_.max_kv_len = std::max(staged_.max_kv_len, past + tokens);
    staged_.uniform = staged_.uniform && tokens == sequences[0].tokens;
    if (cache != nullptr) cache->set_length(slot, past + tokens);
  }
  staged_.groups = grouped(host);
  find_sparse_layers();
  TWELL_CHECK(row == staged_.tokens, "{} ids for sequences of {} tokens in all", ids.size(), row);
  if (cache != nullptr) cache->enqueue_tables(ctx_.stream());
  batch_.enqueue_copy(ctx_, staged_.tokens, staged_.sequences);
}

bool ForwardCuda::sorts_rows() const {
  return route::sorts_rows_by_id(staged_.tokens, plan_.ffn == FfnPolicy::kDense);
}

std::vector<ForwardCuda::SequenceGroup> ForwardCuda::grouped(const BatchArrays& host) const {
  std::vector<SequenceGroup> groups;
  bool one_each = staged_.cache != nullptr;  // so far
  int64_t next = 0;                          // block of wide_ that is free
  for (int64_t i = 0; i < staged_.sequences; ++i) {
    const bool first_of_others = one_each && host.q_len[i] > 1;
    one_each = one_each && host.q_len[i] == 1;
    const bool widened = eight_bits() && !one_each;
    const int64_t blocks = ceil_div(int64_t{host.kv_len[i]}, int64_t{kKvBlock});
    const bool full = widened && next + blocks > wide_.blocks;
    if (i == 0 || first_of_others || full) {
      groups.push_back({.first = i, .widened = widened});
      next = 1;
    }
    SequenceGroup& group = groups.back();
    if (widened) host.wide_begin[i] = std::exchange(next, next + blocks);
    ++group.count;
    group.max_q_len = std::max(group.max_q_len, int64_t{host.q_len[i]});
    group.max_kv_len = std::max(group.max_kv_len, int64_t{host.kv_len[i]});
  }
  return groups;
}

int64_t ForwardCuda::padded_tokens() const { return route::padded_rows(staged_.tokens); }

void ForwardCuda::norm(const BF16* weight, const int32_t* rows) const {
  TWELL_CUDA_CHECK(launch_rms_norm({.tokens = staged_.tokens,
                                    .width = config_.width,
                                    .x = residual_.data(),
                                    .weight = device_bf16(weight),
                                    .y = hidden_.data(),
                                    .eps = static_cast<float>(config_.norm_eps),
                                    .y_rows = rows},
                                   ctx_.stream()));
}

void ForwardCuda::norm_rotated(const BF16* weight, const FfnForwardCuda& ffn,
                               const int32_t* rows) const {
  TWELL_CUDA_CHECK(launch_rotate_norm({.norm = {.tokens = staged_.tokens,
                                                .width = config_.width,
                                                .x = residual_.data(),
                                                .weight = device_bf16(weight),
                                                .y = hidden_.data(),
                                                .eps = static_cast<float>(config_.norm_eps),
                                                .y_rows = rows},
                                       .rotated = ffn.rotated,
                                       .rounding = ffn.weights.screen.rounding,
                                       .bound = ffn.weights.screen.bound},
                                      ctx_.stream()));
}

AttentionCuda ForwardCuda::attention_of(int64_t layer, const SequenceGroup& group) const {
  const BatchArrays batch = batch_.device(staged_.tokens, staged_.sequences);
  const KvCacheCuda* const cache = staged_.cache;
  const __nv_bfloat16* const own_keys = qkv_.data() + config_.q_width();
  const int64_t stride = qkv_width(config_);
  return {.heads = config_.heads,
          .kv_heads = config_.kv_heads,
          .head_dim = config_.head_dim,
          .sequences = {.count = group.count,
                        .max_q_len = group.max_q_len,
                        .max_kv_len = group.max_kv_len,
                        .rows = staged_.tokens,
                        .q_begin = batch.q_begin + group.first,
                        .q_len = batch.q_len + group.first,
                        .kv_len = batch.kv_len + group.first,
                        .kv_begin = batch.kv_begin + group.first,
                        .tables = cache == nullptr ? nullptr : cache->tables(),
                        .blocks = cache == nullptr ? 0 : cache->blocks(),
                        .uniform = staged_.uniform,
                        .ragged = group.ragged},
          .q = qkv_.data(),
          .q_stride = stride,
          .k = cache == nullptr ? own_keys : cache->keys(layer),
          .v = cache == nullptr ? own_keys + config_.kv_width() : cache->values(layer),
          .kv_stride = cache == nullptr ? stride : config_.kv_width(),
          .k8 = cache == nullptr ? KvBytes{} : cache->key_bytes(layer),
          .v8 = cache == nullptr ? KvBytes{} : cache->value_bytes(layer),
          .window = config_.window_of(layer),
          .out = attended_.data()};
}

ForwardCuda::NewRows ForwardCuda::new_rows(int64_t layer) const {
  if (staged_.cache == nullptr) return {};
  if (!eight_bits()) {
    return {staged_.cache->keys(layer), staged_.cache->values(layer),
            batch_.device(staged_.tokens, staged_.sequences).cache_rows};
  }
  __nv_bfloat16* const keys = qkv_.data() + config_.q_width();
  return {keys, keys + config_.kv_width(), wide_.qkv_rows.data()};
}

void ForwardCuda::store_bytes(int64_t layer) const {
  const auto [keys, values, rows] = new_rows(layer);
  TWELL_CUDA_CHECK(launch_kv_store_bytes(
      {.tokens = staged_.tokens,
       .kv_heads = config_.kv_heads,
       .head_dim = config_.head_dim,
       .k = keys,
       .v = values,
       .stride = qkv_width(config_),
       .cache_rows = batch_.device(staged_.tokens, staged_.sequences).cache_rows,
       .keys = staged_.cache->key_bytes(layer),
       .values = staged_.cache->value_bytes(layer)},
      ctx_.stream()));
}

AttentionCuda ForwardCuda::widened(int64_t layer, const SequenceGroup& group) const {
  AttentionCuda problem = attention_of(layer, group);
  AttentionSequencesCuda& sequences = problem.sequences;
  const int64_t* const wide_begin =
      batch_.device(staged_.tokens, staged_.sequences).wide_begin + group.first;
  TWELL_CUDA_CHECK(launch_kv_load_bytes({.sequences = group.count,
                                         .max_kv_len = group.max_kv_len,
                                         .kv_heads = config_.kv_heads,
                                         .head_dim = config_.head_dim,
                                         .kv_len = sequences.kv_len,
                                         .kv_begin = sequences.kv_begin,
                                         .tables = sequences.tables,
                                         .keys = problem.k8,
                                         .values = problem.v8,
                                         .first = wide_begin,
                                         .k = wide_.keys.data(),
                                         .v = wide_.values.data()},
                                        ctx_.stream()));
  sequences.kv_begin = wide_begin;
  sequences.tables = wide_.table.data();
  sequences.blocks = wide_.blocks;
  problem.k = wide_.keys.data();
  problem.v = wide_.values.data();
  problem.k8 = problem.v8 = {};
  sequences.ragged = attention_ragged(ctx_, problem, attention_);
  return problem;
}

void ForwardCuda::attention(int64_t layer) {
  if (eight_bits()) store_bytes(layer);
  for (const SequenceGroup& group : staged_.groups) {
    attention_cuda(ctx_, group.widened ? widened(layer, group) : attention_of(layer, group),
                   attention_);
  }
}

void ForwardCuda::enqueue(int32_t* row_nnz, const ForwardHooksCuda& hooks) {
  const auto done = [&](ForwardStage stage) {
    if (hooks.after_stage) hooks.after_stage(stage);
  };
  const BatchArrays batch = batch_.device(staged_.tokens, staged_.sequences);
  const ModelMatrices<const BF16>& weights = model_.weights();
  TWELL_CUDA_CHECK(launch_embedding({.tokens = staged_.tokens,
                                     .width = config_.width,
                                     .ids = batch.ids,
                                     .table = device_bf16(weights.embedding.data),
                                     .out = residual_.data(),
                                     .drawn = staged_.drawn},
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
      if (model_.in_bytes()) {
        enqueue_byte_layer(layer, row_nnz, hooks);
      } else if (path == route::LayersPath::kFewKernels) {
        enqueue_few_tokens_layer(layer);
      } else {
        enqueue_layer(layer, row_nnz, hooks);
      }
    }
  }
  norm(weights.final_norm);
  done(ForwardStage::kNorm);
}

layer_ops::Qkv ForwardCuda::cached_qkv(int64_t layer, const __nv_bfloat16* x,
                                       const BF16* norm) const {
  const BatchArrays batch = batch_.device(staged_.tokens, staged_.sequences);
  const LayerMatrices<const BF16>& w = model_.weights().layers[static_cast<size_t>(layer)];
  const NewRows to = new_rows(layer);
  return {.input = {.tokens = staged_.tokens,
                    .width = config_.width,
                    .x = x,
                    .norm = device_bf16(norm),
                    .eps = static_cast<float>(config_.norm_eps),
                    .constant_weights = true},
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
          .values = to.values};
}

void ForwardCuda::project(int64_t layer) {
  const BatchArrays batch = batch_.device(staged_.tokens, staged_.sequences);
  const LayerMatrices<const BF16>& w = model_.weights().layers[static_cast<size_t>(layer)];
  const bool cached = staged_.cache != nullptr;
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
  const QkvCuda fused{
      .width = config_.width, .x = hidden_.data(), .w = device_bf16(w.w_qkv.data), .rope = rope};
  if (!config_.qk_norm && qkv_is_fused(ctx_, fused)) {
    qkv_cuda(ctx_, fused);
    return;
  }
  if (cached && !config_.qk_norm && ctx_.compute_capability() == 90) {
    const layer_ops::Qkv few = cached_qkv(layer, hidden_.data(), nullptr);
    if (batch_ops::takes(few)) {
      TWELL_CUDA_CHECK(batch_ops::launch_qkv(few, ctx_.stream()));
      return;
    }
  }
  linear_cuda(ctx_, {.rows = padded_tokens(),
                     .cols = w.w_qkv.rows,
                     .inner = w.w_qkv.cols,
                     .x = hidden_.data(),
                     .w = device_bf16(w.w_qkv.data),
                     .y = qkv_.data(),
                     .constant_weights = true});
  if (config_.qk_norm) {
    TWELL_CUDA_CHECK(launch_head_norm({.tokens = staged_.tokens,
                                       .heads = config_.heads,
                                       .kv_heads = config_.kv_heads,
                                       .head_dim = config_.head_dim,
                                       .bias = device_bf16(w.b_qkv),
                                       .q_norm = device_bf16(w.q_norm),
                                       .k_norm = device_bf16(w.k_norm),
                                       .qkv = qkv_.data(),
                                       .eps = static_cast<float>(config_.norm_eps)},
                                      ctx_.stream()));
  }
  TWELL_CUDA_CHECK(launch_rope(rope, ctx_.stream()));
}

void ForwardCuda::enqueue_layer(int64_t layer, int32_t* row_nnz, const ForwardHooksCuda& hooks) {
  const auto done = [&](ForwardStage stage) {
    if (hooks.after_stage) hooks.after_stage(stage);
  };
  const LayerMatrices<const BF16>& w = model_.weights().layers[static_cast<size_t>(layer)];
  norm(w.attention_norm);
  done(ForwardStage::kNorm);
  project(layer);
  done(ForwardStage::kQkv);
  attention(layer);
  done(ForwardStage::kAttention);
  linear_cuda(ctx_, {.rows = padded_tokens(),
                     .cols = config_.width,
                     .inner = config_.q_width(),
                     .x = attended_.data(),
                     .w = device_bf16(w.w_o.data),
                     .y = residual_.data(),
                     .add = true,
                     .constant_weights = true});
  if (w.b_o != nullptr) {
    TWELL_CUDA_CHECK(launch_bias_forward({.tokens = staged_.tokens,
                                          .width = config_.width,
                                          .bias = device_bf16(w.b_o),
                                          .x = residual_.data()},
                                         ctx_.stream()));
  }
  done(ForwardStage::kOutput);
  FfnForwardCuda ffn{.tokens = staged_.tokens,
                     .rows = padded_tokens(),
                     .weights = {.w_gate = device_bf16(w.ffn.w_gate.data),
                                 .w_up = device_bf16(w.ffn.w_up.data),
                                 .w_down = device_bf16(w.ffn.w_down.data),
                                 .activation = config_.activation,
                                 .b_gate = device_bf16(w.ffn.b_gate),
                                 .b_up = device_bf16(w.ffn.b_up),
                                 .b_down = device_bf16(w.ffn.b_down),
                                 .screen = rotated_gate(layer),
                                 .threshold = threshold()},
                     .x = hidden_.data(),
                     .y = residual_.data(),
                     .row_nnz = row_nnz == nullptr ? nullptr : row_nnz + layer * staged_.tokens,
                     .add = true,
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
    norm(w.ffn_norm, rows);
  }
  done(ForwardStage::kNorm);
  if (hooks.ffn) {
    hooks.ffn(layer, ffn);
  } else {
    ffn_forward_cuda(ctx_, ffn, ffn_plans_[layer], ffn_);
  }
  done(ForwardStage::kFfn);
}

route::Batch ForwardCuda::staged_batch(bool observed, bool one_kernel) const {
  return {.tokens = staged_.tokens,
          .cached = staged_.cache != nullptr,
          .observed = observed,
          .most_new = staged_.max_q_len,
          .most_keys = staged_.max_kv_len,
          .one_kernel = one_kernel};
}

void ForwardCuda::find_sparse_layers() {
  if (plans_revision_ == ffn_plans_.revision()) return;
  plans_revision_ = ffn_plans_.revision();
  int64_t sparse = 0;
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    const GpuFfnCall call{.tokens = route::kSparseProbeTokens,
                          .policy = ffn_plans_[layer].plan.policy};
    const GpuFfnChoice choice = choose_gpu_ffn(ffn_layer_, call, ffn_plans_[layer].activity);
    sparse += choice.execution->sparse;
  }
  layers_.sparse = 2 * sparse > config_.layers;
}

route::LayersPath ForwardCuda::choose_path(bool observed, bool one_kernel) const {
  if (model_.in_bytes()) return route::LayersPath::kSingleOps;
  return route::layers_path(layers_, staged_batch(observed, one_kernel));
}

route::LayersPath ForwardCuda::path() const { return choose_path(false, false); }

void ForwardCuda::enqueue_few_tokens_layer(int64_t layer) {
  const LayerMatrices<const BF16>& w = model_.weights().layers[static_cast<size_t>(layer)];
  const float eps = static_cast<float>(config_.norm_eps);
  const layer_ops::Qkv normed = cached_qkv(layer, hidden_.data(), nullptr);
  const bool batch = route::norm_apart(staged_.tokens) && batch_ops::takes(normed);
  if (batch) {
    norm(w.attention_norm);
    TWELL_CUDA_CHECK(batch_ops::launch_qkv(normed, ctx_.stream()));
  } else {
    TWELL_CUDA_CHECK(layer_ops::launch_qkv(cached_qkv(layer, residual_.data(), w.attention_norm),
                                           ctx_.stream()));
  }
  attention(layer);
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
  ffn_forward_cuda(ctx_,
                   {.tokens = staged_.tokens,
                    .weights = {.w_gate = device_bf16(w.ffn.w_gate.data),
                                .w_up = device_bf16(w.ffn.w_up.data),
                                .w_down = device_bf16(w.ffn.w_down.data),
                                .activation = config_.activation,
                                .threshold = threshold()},
                    .x = residual_.data(),
                    .y = residual_.data(),
                    .norm = device_bf16(w.ffn_norm),
                    .eps = eps,
                    .add = true},
                   ffn_plans_[layer], ffn_);
}

void ForwardCuda::enqueue_decode_layers(const ForwardHooksCuda& hooks) {
  const BatchArrays batch = batch_.device(staged_.tokens, staged_.sequences);
  DecodeLayers problem{.tokens = static_cast<int>(staged_.tokens),
                       .layers = static_cast<int>(config_.layers),
                       .width = static_cast<int>(config_.width),
                       .ffn = static_cast<int>(config_.ffn),
                       .heads = static_cast<int>(config_.heads),
                       .kv_heads = static_cast<int>(config_.kv_heads),
                       .head_dim = static_cast<int>(config_.head_dim),
                       .eps = static_cast<float>(config_.norm_eps),
                       .cos = cos_.data(),
                       .sin = sin_.data(),
                       .positions = batch.positions,
                       .cache_rows = batch.cache_rows,
                       .tables = staged_.cache->tables(),
                       .kv_begin = batch.kv_begin,
                       .kv_len = batch.kv_len,
                       .x = residual_.data(),
                       .workspace = decode_workspace(decode_shape_, decode_memory_.data())};
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

void ForwardCuda::run(std::span<const int32_t> ids, std::span<const ForwardSequence> sequences,
                      KvCacheCuda* cache, int32_t* row_nnz, const ForwardHooksCuda& hooks) {
  stage(ids, sequences, cache);
  enqueue(row_nnz, hooks);
}

void ForwardCuda::logits(const __nv_bfloat16* hidden, int64_t rows, float* out) const {
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
