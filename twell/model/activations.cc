// SPDX-License-Identifier: Apache-2.0
#include "twell/model/activations.h"

#include <algorithm>

#include "twell/base/error.h"
#include "twell/model/named_carver.h"
#include "twell/model/rotary.h"
#include "twell/ops/cross_entropy/cross_entropy.h"

namespace twell {
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

int64_t token_count(MicroBatchShape shape) { return shape.sequences * shape.length; }

void require_shape(const ModelConfig& config, MicroBatchShape shape) {
  TWELL_REQUIRE(shape.sequences >= 1, "a micro-batch holds at least 1 sequence, got {}",
                shape.sequences);
  TWELL_REQUIRE(shape.length >= 1 && shape.length <= config.context,
                "a sequence length of {} does not fit the model's context of {}", shape.length,
                config.context);
  TWELL_REQUIRE(!config.mlp_bias,
                "feed-forward layers with biases (mlp_bias) run, but are not trained");
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
      positions(token_count(shape)) {
  const int64_t tokens = token_count(shape);
  NamedCarver plan(nullptr, kAlignBytes);
  carve(config, tokens, plan);
  memory = Buffer<float>(plan.bytes() / kFloatBytes);
  NamedCarver carver(memory.data(), kAlignBytes);
  views = carve(config, tokens, carver);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    ffn.emplace_back(tokens, config.ffn, config.gated);
  }
  for (int64_t i = 0; i < tokens; ++i) positions[i] = static_cast<int32_t>(i % shape.length);
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
  const int64_t tokens = token_count(shape);
  // The dense FFN backward holds the gradients of g and u, and h, of 512 tokens.
  const int64_t matrices = config.gated ? 3 : config.activation == Activation::kRelu ? 1 : 2;
  const int64_t feed_forward = matrices * std::min<int64_t>(tokens, 512) * config.ffn * kFloatBytes;
  return std::max(cross_entropy_scratch_bytes(tokens, config.vocab_size), feed_forward) +
         kProductBytes;
}

std::vector<MemoryItem> TrainingState::memory_plan(const ModelConfig& config,
                                                   MicroBatchShape shape) {
  require_shape(config, shape);
  const int64_t tokens = token_count(shape);
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

}  // namespace twell
