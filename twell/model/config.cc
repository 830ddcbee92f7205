// SPDX-License-Identifier: Apache-2.0
#include "twell/model/config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "twell/base/error.h"

namespace twell {
namespace {

// Larger than any model, and small enough that no product of sizes overflows 64 bits.
constexpr int64_t kMaxVocab = int64_t{1} << 24;
constexpr int64_t kMaxWidth = int64_t{1} << 20;
constexpr int64_t kMaxFfn = int64_t{1} << 24;
constexpr int64_t kMaxLayers = int64_t{1} << 16;
constexpr int64_t kMaxHeads = int64_t{1} << 16;
constexpr int64_t kMaxHeadDim = int64_t{1} << 12;
constexpr int64_t kMaxContext = int64_t{1} << 26;
constexpr int64_t kMaxParameters = int64_t{1} << 40;  // 4 TiB of f32

void require_range(const char* name, int64_t value, int64_t max) {
  TWELL_REQUIRE(value >= 1 && value <= max, "{} must be between 1 and {}, got {}", name, max,
                value);
}

void require_token(const char* name, int64_t token, int64_t vocab_size) {
  TWELL_REQUIRE(token >= -1 && token < vocab_size,
                "{} must be below vocab_size {} (or -1 for none), got {}", name, vocab_size, token);
}

// The comparisons are false for NaN.
void require_real(const char* name, double value, double low, double high) {
  TWELL_REQUIRE(value >= low && value <= high,
                "{} of the rope scaling must be between {} and {}, "
                "got {}",
                name, low, high, value);
}

void require_rope_scaling(const RopeScaling& rope) {
  constexpr double kMaxFactor = 1e6;
  require_real("factor", rope.factor, 1.0, kMaxFactor);
  if (rope.type == RopeType::kLlama3) {
    require_real("low_freq_factor", rope.low_freq_factor, 1e-6, kMaxFactor);
    require_real("high_freq_factor", rope.high_freq_factor, 1e-6, kMaxFactor);
    TWELL_REQUIRE(rope.high_freq_factor > rope.low_freq_factor,
                  "high_freq_factor {} of the rope scaling must be above low_freq_factor {}",
                  rope.high_freq_factor, rope.low_freq_factor);
  }
  if (rope.type == RopeType::kYarn) {
    require_real("beta_fast", rope.beta_fast, 1e-6, kMaxFactor);
    require_real("beta_slow", rope.beta_slow, 1e-6, kMaxFactor);
    require_real("attention_factor", rope.attention_factor, 0.0, kMaxFactor);
    require_real("mscale", rope.mscale, 0.0, kMaxFactor);
    require_real("mscale_all_dim", rope.mscale_all_dim, 0.0, kMaxFactor);
  }
  if (rope.type == RopeType::kLlama3 || rope.type == RopeType::kYarn) {
    TWELL_REQUIRE(rope.original_context >= 1 && rope.original_context <= kMaxContext,
                  "original_max_position_embeddings of the rope scaling must be between 1 and {}, "
                  "got {}",
                  kMaxContext, rope.original_context);
  }
}

struct Preset {
  std::string_view name;
  int64_t layers, vocab_size, width, gated_ffn, plain_ffn, heads, context;
};

// "tiny" is small enough to learn something in a few minutes on two cores, with an FFN large enough
// for sparsity to pay off.
constexpr Preset kPresets[] = {{"tiny", 4, 4096, 256, 1024, 1536, 4, 256},
                               {"0.5b", 8, 49152, 2048, 5632, 8192, 32, 2048},
                               {"1b", 18, 49152, 2048, 5632, 8192, 32, 2048},
                               {"1.5b", 28, 49152, 2048, 5632, 8192, 32, 2048},
                               {"2b", 38, 49152, 2048, 5632, 8192, 32, 2048}};

}  // namespace

void ModelConfig::validate() const {
  require_range("vocab_size", vocab_size, kMaxVocab);
  require_range("hidden_size", width, kMaxWidth);
  require_range("intermediate_size", ffn, kMaxFfn);
  require_range("num_hidden_layers", layers, kMaxLayers);
  require_range("num_attention_heads", heads, kMaxHeads);
  require_range("num_key_value_heads", kv_heads, kMaxHeads);
  require_range("head_dim", head_dim, kMaxHeadDim);
  require_range("max_position_embeddings", context, kMaxContext);
  TWELL_REQUIRE(width % 8 == 0, "hidden_size must be a multiple of 8, got {}", width);
  TWELL_REQUIRE(head_dim % 2 == 0, "head_dim must be even for rotary embeddings, got {}", head_dim);
  TWELL_REQUIRE(q_width() <= kMaxWidth,
                "num_attention_heads {} times head_dim {} must be at most {}", heads, head_dim,
                kMaxWidth);
  TWELL_REQUIRE(heads % kv_heads == 0,
                "num_key_value_heads must divide num_attention_heads, got {} and {}", kv_heads,
                heads);
  // The comparisons are false for NaN.
  TWELL_REQUIRE(rope_theta >= 1.0 && rope_theta <= 1e15,
                "rope_theta must be between 1 and 1e15, got {}", rope_theta);
  TWELL_REQUIRE(norm_eps > 0.0 && norm_eps < 1.0,
                "rms_norm_eps must be above 0 and below 1, got {}", norm_eps);
  TWELL_REQUIRE(init_std >= 0.0 && init_std <= 10.0,
                "initializer_range must be between 0 and 10, got {}", init_std);
  require_token("bos_token_id", bos_token, vocab_size);
  require_token("eos_token_id", eos_token, vocab_size);
  for (const int64_t token : more_eos_tokens) require_token("eos_token_id", token, vocab_size);
  require_rope_scaling(rope_scaling);
  TWELL_REQUIRE(activation_threshold >= 0.0 && activation_threshold <= 1e6,
                "the threshold of fatrelu must be between 0 and 1e6, got {}", activation_threshold);
  TWELL_REQUIRE(activation == Activation::kFatRelu || activation_threshold == 0.0,
                "a threshold of {} goes with fatrelu, not with {}", activation_threshold,
                activation_name(activation));
  TWELL_REQUIRE(activation != Activation::kDRelu || gated,
                "drelu is for layers with a gate, and this model has none");
  TWELL_REQUIRE(sliding_window >= 0 && sliding_window <= kMaxContext,
                "sliding_window must be between 1 and {}, or null, got {}", kMaxContext,
                sliding_window);
  TWELL_REQUIRE(full_attention.empty() || std::ssize(full_attention) == layers,
                "the kinds of attention of {} layers are given, the model has {}",
                full_attention.size(), layers);
  TWELL_REQUIRE(embedding_scale > 0.0 && embedding_scale <= 1e6,
                "scale_emb must be above 0 and at most 1e6, got {}", embedding_scale);
  TWELL_REQUIRE(depth_scale >= 0.0 && depth_scale <= 1e6 && part_scale() >= 1e-3,
                "scale_depth must be above 0, at least a thousandth of the square root of the {} "
                "layers and at most 1e6, got {}",
                layers, depth_scale);
  TWELL_REQUIRE(base_width >= 0 && base_width <= kMaxWidth,
                "dim_model_base must be between 1 and {}, got {}", kMaxWidth, base_width);
  TWELL_REQUIRE(!scaled() || !qk_norm,
                "scaled residuals and norms of queries and keys do not go together");
  TWELL_REQUIRE(qkv_bias || !o_bias,
                "a bias on the attention's output needs biases on queries, keys and values");
  TWELL_REQUIRE(parameter_count() <= kMaxParameters,
                "the model would have {} parameters, more than {}", parameter_count(),
                kMaxParameters);
}

double ModelConfig::part_scale() const {
  return depth_scale == 0.0 ? 1.0 : depth_scale / std::sqrt(static_cast<double>(layers));
}

int64_t ModelConfig::parameter_count() const {
  const int64_t attention = (2 * q_width() + 2 * kv_width()) * width;
  const int64_t feed_forward = (gated ? 3 : 2) * ffn * width;
  const int64_t norms = 2 * width + (qk_norm ? 2 * head_dim : 0);
  const int64_t biases = (qkv_bias ? q_width() + 2 * kv_width() : 0) + (o_bias ? width : 0) +
                         (mlp_bias ? (gated ? 2 : 1) * ffn + width : 0);
  const int64_t tables = (tied_embeddings ? 1 : 2) * vocab_size * width;
  return layers * (attention + feed_forward + norms + biases) + tables + width;
}

double ModelConfig::forward_flops_per_token(int64_t seq) const {
  const auto d = [](int64_t value) { return static_cast<double>(value); };
  const double projections = 2.0 * d(q_width() + kv_width()) * d(width);
  const double feed_forward = (gated ? 3.0 : 2.0) * d(ffn) * d(width);
  double keys = 0.0;  // that a token sees on average, over all layers
  for (int64_t layer = 0; layer < layers; ++layer) {
    const int64_t window = window_of(layer);
    const double most = d(window == 0 ? seq : std::min(window, seq));
    keys += most - most * (most - 1.0) / (2.0 * d(seq));
  }
  const double attention = 2.0 * keys * d(q_width());  // scores and values
  const double head = d(vocab_size) * d(width);
  return 2.0 * (d(layers) * (projections + feed_forward) + attention + head);
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const Preset& preset : kPresets) names.emplace_back(preset.name);
  return names;
}

ModelConfig preset_config(std::string_view name, bool gated) {
  for (const Preset& preset : kPresets) {
    if (preset.name != name) continue;
    ModelConfig config;
    config.vocab_size = preset.vocab_size;
    config.width = preset.width;
    config.ffn = gated ? preset.gated_ffn : preset.plain_ffn;
    config.layers = preset.layers;
    config.heads = config.kv_heads = preset.heads;
    config.head_dim = 64;
    config.context = preset.context;
    config.gated = gated;
    return config;
  }
  throw InputError(fmt::format("unknown preset \"{}\"; the presets are {}", name,
                               fmt::join(preset_names(), ", ")));
}

}  // namespace twell
