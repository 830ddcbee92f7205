// SPDX-License-Identifier: Apache-2.0
#include "twell/model/training.h"

#include <algorithm>

#include "twell/base/error.h"
#include "twell/model/activations.h"
#include "twell/model/named_carver.h"
#include "twell/model/rotary.h"
#include "twell/ops/attention/attention.h"
#include "twell/ops/bias/bias.h"
#include "twell/ops/cross_entropy/cross_entropy.h"
#include "twell/ops/embedding/embedding.h"
#include "twell/ops/matmul/matmul.h"
#include "twell/ops/rms_norm/rms_norm.h"

namespace twell {

// --- Memory --------------------------------------------------------------------------------------

namespace {

constexpr int64_t kFloatBytes = static_cast<int64_t>(sizeof(float));
constexpr auto kAlignBytes = static_cast<int64_t>(kAlignment);

ActivationViews carve(const ModelConfig& config, int64_t tokens, NamedCarver& carver) {
  constexpr const char* kStream = "activations: residual stream and norms";
  constexpr const char* kAttention = "activations: attention";
  constexpr const char* kGradients = "gradients of activations";
  ActivationViews views;
  views.layers.resize(static_cast<size_t>(config.layers));
  for (LayerActivations& layer : views.layers) {
    layer.attention_in = carver.matrix<float>(kStream, tokens, config.width);
    carver.array(kStream, tokens, layer.attention_inv_rms);
    layer.attention_normed = carver.matrix<float>(kStream, tokens, config.width);
    if (config.qk_norm) {
      layer.qk_in = carver.matrix<float>(kAttention, tokens, config.q_width() + config.kv_width());
      carver.array(kAttention, tokens * (config.heads + config.kv_heads), layer.qk_inv_rms);
    }
    layer.qkv = carver.matrix<float>(kAttention, tokens, qkv_width(config));
    carver.array(kAttention, tokens * config.heads, layer.logsumexp);
    layer.attended = carver.matrix<float>(kAttention, tokens, config.q_width());
    layer.ffn_in = carver.matrix<float>(kStream, tokens, config.width);
    carver.array(kStream, tokens, layer.ffn_inv_rms);
    layer.ffn_normed = carver.matrix<float>(kStream, tokens, config.width);
  }
  views.delta = carver.matrix<float>(kStream, tokens, config.width);
  views.final_in = carver.matrix<float>(kStream, tokens, config.width);
  carver.array(kStream, tokens, views.final_inv_rms);
  views.final_normed = carver.matrix<float>(kStream, tokens, config.width);
  views.d_residual = carver.matrix<float>(kGradients, tokens, config.width);
  views.d_normed = carver.matrix<float>(kGradients, tokens, config.width);
  views.d_qkv = carver.matrix<float>(kGradients, tokens, qkv_width(config));
  views.d_attended = carver.matrix<float>(kGradients, tokens, config.q_width());
  return views;
}

void require_shape(const ModelConfig& config, MicroBatchShape shape) {
  TWELL_REQUIRE(shape.sequences >= 1, "a micro-batch holds at least 1 sequence, got {}",
                shape.sequences);
  TWELL_REQUIRE(shape.length >= 1 && shape.length <= config.context,
                "a sequence length of {} does not fit the model's context of {}", shape.length,
                config.context);
  // With this bound and the limits of a configuration, no size in bytes overflows.
  constexpr int64_t kMaxTokens = int64_t{1} << 24;
  TWELL_REQUIRE(shape.sequences <= kMaxTokens / shape.length,
                "a micro-batch of {} sequences of {} tokens is larger than {} tokens; use more "
                "micro-batches per step",
                shape.sequences, shape.length, kMaxTokens);
}

}  // namespace

TrainingState::Activations::Activations(const ModelConfig& config, MicroBatchShape shape_in)
    : shape((require_shape(config, shape_in), shape_in)),
      rope(rope_table(config, shape.length)),
      positions(shape.tokens()) {
  const int64_t tokens = shape.tokens();
  NamedCarver plan(nullptr, kAlignBytes);
  carve(config, tokens, plan);
  memory = Buffer<float>(plan.bytes() / kFloatBytes);
  NamedCarver carver(memory.data(), kAlignBytes);
  views = carve(config, tokens, carver);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    ffn.emplace_back(tokens, config.ffn, config.gated);
  }
}

std::vector<AttentionSequence> TrainingState::Activations::sequences(
    const QkvViews& qkv, std::span<const int64_t> documents) const {
  std::vector<AttentionSequence> out;
  for (int64_t row = 0; row < qkv.q.rows; row += out.back().q_len) {
    const int64_t length = documents.empty() ? shape.length : documents[out.size()];
    out.push_back({.q_begin = row,
                   .q_len = length,
                   .k = qkv.k.slice_rows(row, length),
                   .v = qkv.v.slice_rows(row, length)});
  }
  return out;
}

TrainingState::TrainingState(const ModelConfig& config, MicroBatchShape shape)
    : activations_(std::make_unique<Activations>(config, shape)) {}

TrainingState::~TrainingState() = default;

// The largest scratch memory of any op, because ops run one after another. A test compares it with
// the actual use of a step.
int64_t TrainingState::scratch_bytes(const ModelConfig& config, MicroBatchShape shape) {
  // oneDNN packs operands of a product: up to 5.2 MiB on two cores with the tiny preset.
  constexpr int64_t kProductBytes = int64_t{6} << 20;
  const int64_t tokens = shape.tokens();
  // The dense FFN backward holds the gradients of g and u, and h, of 512 tokens.
  const int64_t matrices = config.gated ? 3 : config.activation == Activation::kRelu ? 1 : 2;
  const int64_t feed_forward = matrices * std::min<int64_t>(tokens, 512) * config.ffn * kFloatBytes;
  return std::max(cross_entropy_scratch_bytes(tokens, config.vocab_size), feed_forward) +
         kProductBytes;
}

std::vector<MemoryItem> TrainingState::memory_plan(const ModelConfig& config,
                                                   MicroBatchShape shape) {
  require_shape(config, shape);
  const int64_t tokens = shape.tokens();
  NamedCarver carver(nullptr, kAlignBytes);
  carve(config, tokens, carver);
  std::vector<MemoryItem> items = carver.take_items();
  items.push_back(
      {"activations: FFN", config.layers * FfnSaved::bytes(tokens, config.ffn, config.gated)});
  const int64_t rope_values = shape.length * config.head_dim;  // cos and sin of half a head each
  items.push_back({"positions and rotations", (rope_values + tokens) * kFloatBytes});
  items.push_back({"scratch of the ops (estimate)", scratch_bytes(config, shape)});
  return items;
}

// --- The pass ------------------------------------------------------------------------------------

namespace {

// Forward and backward of one micro-batch. Each backward function mirrors the forward function of
// the same name in reverse order.
class TrainingPass {
 public:
  TrainingPass(Context& ctx, const Model& model, const TrainingBatch& batch,
               TrainingState::Activations& activations, float* d_flat)
      : ctx_(ctx),
        config_(model.config),
        weights_(model.weights),
        grads_(model_matrices<float>(model.config, d_flat)),
        batch_(batch),
        act_(activations),
        views_(activations.views),
        eps_(model.config.stream_eps()) {}

  TrainingResult run() {
    set_positions();
    forward();
    loss();
    backward();
    return std::move(result_);
  }

 private:
  using LayerWeights = LayerMatrices<const float>;
  using LayerGrads = LayerMatrices<float>;

  void forward() {
    await_weights(-1);
    embedding_forward(ctx_, batch_.inputs, weights_.embedding, views_.layers[0].attention_in,
                      config_.stream_embedding_scale());
    for (size_t layer = 0; layer < views_.layers.size(); ++layer) {
      await_weights(static_cast<int64_t>(layer));
      const LayerWeights& w = weights_.layers[layer];
      LayerActivations& a = views_.layers[layer];
      attention_norm_forward(layer, w, a);
      attention_block_forward(layer, w, a);
      norm_forward(a.attention_in, views_.delta, a.ffn_in, w.ffn_norm, a.ffn_normed, a.ffn_inv_rms);
      feed_forward_forward(layer, w, a);
    }
    await_weights(config_.layers);
    norm_forward(views_.layers.back().ffn_in, views_.delta, views_.final_in, weights_.final_norm,
                 views_.final_normed, views_.final_inv_rms, config_.hidden_scale());
  }

  void set_positions() {
    int32_t* at = act_.positions.data();
    const auto count = [&](int64_t length) {
      for (int32_t i = 0; i < static_cast<int32_t>(length); ++i) *at++ = i;
    };
    for (const int64_t length : batch_.documents) count(length);
    if (!batch_.documents.empty()) return;
    for (int64_t i = 0; i < act_.shape.sequences; ++i) count(act_.shape.length);
  }

  void await_weights(int64_t layer) const {
    if (batch_.before_layer) batch_.before_layer(layer);
  }

  // The loss includes the output head, because all logits are never stored; hence it also computes
  // the head's gradients.
  void loss() {
    if (!batch_.teacher_hidden.empty()) return distillation_loss();
    const CrossEntropyResult ce = cross_entropy(ctx_, {.x = views_.final_normed,
                                                       .weight = weights_.head,
                                                       .targets = batch_.targets,
                                                       .grad_scale = 1.0f / step_targets(),
                                                       .d_x = views_.d_normed,
                                                       .d_weight = grads_.head});
    result_.loss_sum = ce.loss_sum;
    result_.loss_tokens = ce.tokens;
  }

  void distillation_loss() {
    const DistillationResult result = distill(ctx_, {.x = views_.final_normed,
                                                     .weight = weights_.head,
                                                     .teacher_x = batch_.teacher_hidden,
                                                     .teacher_weight = batch_.teacher_head,
                                                     .targets = batch_.targets,
                                                     .share = batch_.teacher_share,
                                                     .grad_scale = 1.0f / step_targets(),
                                                     .d_x = views_.d_normed,
                                                     .d_weight = grads_.head});
    result_.loss_sum = result.ce_sum;
    result_.kl_sum = result.kl_sum;
    result_.loss_tokens = result.tokens;
  }

  void backward() {
    std::fill_n(views_.d_residual.data, views_.d_residual.rows * views_.d_residual.cols, 0.0f);
    norm_backward(views_.final_in, weights_.final_norm, views_.final_inv_rms, grads_.final_norm,
                  config_.hidden_scale());
    for (size_t layer = views_.layers.size(); layer-- > 0;) {
      const LayerWeights& w = weights_.layers[layer];
      const LayerGrads& d = grads_.layers[layer];
      const LayerActivations& a = views_.layers[layer];
      feed_forward_backward(layer, w, a, d);
      norm_backward(a.ffn_in, w.ffn_norm, a.ffn_inv_rms, d.ffn_norm);
      attention_block_backward(layer, w, a, d);
      norm_backward(a.attention_in, w.attention_norm, a.attention_inv_rms, d.attention_norm);
    }
    embedding_backward(ctx_, batch_.inputs, views_.d_residual, grads_.embedding,
                       config_.stream_embedding_scale());
  }

  // The first layer reads the embedding, all others the sum after the previous layer.
  void attention_norm_forward(size_t layer, const LayerWeights& w, LayerActivations& a) {
    if (layer == 0) {
      rms_norm_forward(ctx_, {.x = a.attention_in,
                              .weight = w.attention_norm,
                              .y = a.attention_normed,
                              .inv_rms = a.attention_inv_rms,
                              .eps = eps_});
    } else {
      norm_forward(views_.layers[layer - 1].ffn_in, views_.delta, a.attention_in, w.attention_norm,
                   a.attention_normed, a.attention_inv_rms);
    }
  }

  // sum = residual + delta; y = scale * norm(sum)
  void norm_forward(MatrixF residual, MatrixF delta, MatrixF sum, const float* weight, MatrixF y,
                    float* inv_rms, float scale = 1.0f) {
    rms_norm_forward(ctx_, {.x = residual,
                            .residual = delta,
                            .sum = sum,
                            .weight = weight,
                            .y = y,
                            .inv_rms = inv_rms,
                            .eps = eps_,
                            .scale = scale});
  }

  // Both terms of a sum have the sum's gradient, so d_residual is passed to both.
  void norm_backward(MatrixF sum, const float* weight, const float* inv_rms, float* d_weight,
                     float scale = 1.0f) {
    rms_norm_backward(ctx_, {.s = sum,
                             .weight = weight,
                             .inv_rms = inv_rms,
                             .d_y = views_.d_normed,
                             .d_s = views_.d_residual,
                             .d_weight = d_weight,
                             .scale = scale});
  }

  void attention_block_forward(size_t layer, const LayerWeights& w, LayerActivations& a) {
    const QkvViews qkv = split_qkv(config_, a.qkv);
    linear_forward(ctx_, a.attention_normed, w.w_qkv, a.qkv);
    if (w.b_qkv != nullptr) bias_forward(ctx_, w.b_qkv, a.qkv);
    if (w.q_norm != nullptr) head_norms_forward(w, a, qkv);
    rope(ctx_, act_.rope, act_.positions.span(), qkv.qk);
    attention_forward(ctx_, {.shape = attention_shape(layer),
                             .sequences = act_.sequences(qkv, batch_.documents),
                             .q = qkv.q,
                             .out = a.attended,
                             .logsumexp = a.logsumexp});
    linear_forward(ctx_, a.attended, w.w_o, views_.delta);
    if (w.b_o != nullptr) bias_forward(ctx_, w.b_o, views_.delta);
  }

  void attention_block_backward(size_t layer, const LayerWeights& w, const LayerActivations& a,
                                const LayerGrads& d) {
    const QkvViews qkv = split_qkv(config_, a.qkv);
    const QkvViews d_qkv = split_qkv(config_, views_.d_qkv);
    if (w.b_o != nullptr) bias_backward(ctx_, views_.d_residual, d.b_o);
    linear_backward(ctx_, {.x = a.attended,
                           .weight = w.w_o,
                           .d_y = views_.d_residual,
                           .d_x = views_.d_attended,
                           .d_weight = d.w_o});
    attention_backward(ctx_, {.shape = attention_shape(layer),
                              .sequences = act_.sequences(qkv, batch_.documents),
                              .q = qkv.q,
                              .out = a.attended,
                              .logsumexp = a.logsumexp,
                              .d_out = views_.d_attended,
                              .d_q = d_qkv.q,
                              .d_k = d_qkv.k,
                              .d_v = d_qkv.v});
    rope(ctx_, act_.rope, act_.positions.span(), d_qkv.qk, /*inverse=*/true);
    if (w.q_norm != nullptr) head_norms_backward(w, a, d_qkv, d);
    if (w.b_qkv != nullptr) bias_backward(ctx_, views_.d_qkv, d.b_qkv);
    linear_backward(ctx_, {.x = a.attention_normed,
                           .weight = w.w_qkv,
                           .d_y = views_.d_qkv,
                           .d_x = views_.d_normed,
                           .d_weight = d.w_qkv});
  }

  void head_norms_forward(const LayerWeights& w, LayerActivations& a, const QkvViews& qkv) {
    for (int64_t m = 0; m < qkv.qk.rows; ++m) {
      std::copy_n(qkv.qk.row(m), qkv.qk.cols, a.qk_in.row(m));
    }
    head_norm_forward(ctx_, qkv.q, config_.head_dim, w.q_norm, eps_, a.qk_inv_rms);
    head_norm_forward(ctx_, qkv.k, config_.head_dim, w.k_norm, eps_, key_inv_rms(a));
  }

  void head_norms_backward(const LayerWeights& w, const LayerActivations& a, const QkvViews& d_qkv,
                           const LayerGrads& d) {
    const int64_t q_width = config_.q_width(), stride = a.qk_in.stride;
    head_norm_backward(ctx_, {.x = {a.qk_in.data, a.qk_in.rows, q_width, stride},
                              .head_dim = config_.head_dim,
                              .weight = w.q_norm,
                              .inv_rms = a.qk_inv_rms,
                              .d = d_qkv.q,
                              .d_weight = d.q_norm});
    head_norm_backward(ctx_,
                       {.x = {a.qk_in.data + q_width, a.qk_in.rows, config_.kv_width(), stride},
                        .head_dim = config_.head_dim,
                        .weight = w.k_norm,
                        .inv_rms = key_inv_rms(a),
                        .d = d_qkv.k,
                        .d_weight = d.k_norm});
  }

  float* key_inv_rms(const LayerActivations& a) const {
    return a.qk_inv_rms + config_.heads * a.qk_in.rows;
  }

  void feed_forward_forward(size_t layer, const LayerWeights& w, LayerActivations& a) {
    FfnTrainForward problem = {
        .weights = ffn_weights(w), .x = a.ffn_normed, .y = views_.delta, .policy = batch_.policy};
    if (!batch_.nnz_hint.empty()) problem.nnz_hint = batch_.nnz_hint[layer];
    if (batch_.active != nullptr) problem.active = (*batch_.active)[layer];
    result_.layers.push_back(ffn_train_forward(ctx_, problem, act_.ffn[layer]));
  }

  void feed_forward_backward(size_t layer, const LayerWeights& w, const LayerActivations& a,
                             const LayerGrads& d) {
    const float l1_scale = batch_.l1_coeff / (static_cast<float>(config_.layers) * step_tokens());
    ffn_train_backward(ctx_,
                       {.weights = ffn_weights(w),
                        .x = a.ffn_normed,
                        .d_y = views_.d_residual,
                        .l1_scale = l1_scale,
                        .d_x = views_.d_normed,
                        .grads = d.ffn},
                       act_.ffn[layer]);
  }

  FfnWeights ffn_weights(const LayerWeights& w) const {
    FfnWeights weights = w.ffn;
    if (batch_.activation) weights.activation = *batch_.activation;
    return weights;
  }
  AttentionShape attention_shape(size_t layer) const {
    return {config_.heads, config_.kv_heads, config_.head_dim,
            config_.window_of(static_cast<int64_t>(layer))};
  }
  float step_tokens() const { return static_cast<float>(batch_.step_tokens); }
  float step_targets() const {
    return static_cast<float>(batch_.step_targets > 0 ? batch_.step_targets : batch_.step_tokens);
  }

  Context& ctx_;
  const ModelConfig& config_;
  const ModelMatrices<const float>& weights_;
  const ModelMatrices<float> grads_;
  const TrainingBatch& batch_;
  TrainingState::Activations& act_;
  ActivationViews& views_;
  const float eps_;
  TrainingResult result_;
};

void check_batch(const ModelConfig& config, const TrainingBatch& batch, MicroBatchShape shape) {
  const int64_t tokens = shape.tokens();
  const auto per_layer = [&](const auto& values) { return std::ssize(values) == config.layers; };
  TWELL_CHECK(std::ssize(batch.inputs) == tokens && std::ssize(batch.targets) == tokens,
              "{} inputs and {} targets for a micro-batch of {} x {} tokens", batch.inputs.size(),
              batch.targets.size(), shape.sequences, shape.length);
  check_documents(batch.documents, shape);
  TWELL_CHECK(batch.step_tokens >= 1, "a step of {} tokens", batch.step_tokens);
  TWELL_CHECK(batch.nnz_hint.empty() || per_layer(batch.nnz_hint), "{} nnz hints for {} layers",
              batch.nnz_hint.size(), config.layers);
  TWELL_CHECK(batch.active == nullptr || per_layer(*batch.active),
              "flags of active neurons for {} of {} layers", batch.active->size(), config.layers);
}

}  // namespace

void check_documents(std::span<const int64_t> documents, MicroBatchShape shape) {
  int64_t begin = 0;
  for (const int64_t length : documents) {
    TWELL_CHECK(length >= 1 && begin % shape.length + length <= shape.length,
                "a document of {} tokens from token {} on in sequences of {}", length, begin,
                shape.length);
    begin += length;
  }
  TWELL_CHECK(documents.empty() || begin == shape.tokens(),
              "documents of {} tokens in {} sequences of {}", begin, shape.sequences, shape.length);
}

TrainingResult forward_backward(Context& ctx, const Model& model, const TrainingBatch& batch,
                                TrainingState& state, std::span<float> d_flat) {
  check_batch(model.config, batch, state.activations().shape);
  TWELL_CHECK(std::ssize(d_flat) == model.flat.size(), "{} gradients for {} parameters",
              d_flat.size(), model.flat.size());
  return TrainingPass(ctx, model, batch, state.activations(), d_flat.data()).run();
}

}  // namespace twell
