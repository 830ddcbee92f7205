// SPDX-License-Identifier: Apache-2.0
// Model configuration: Llama and its relatives.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "twell/format/activation.h"

namespace twell {

// The family determines the names and keys of a checkpoint. The features of its layers are fields
// of ModelConfig.
enum class Family {
  kLlama,
  kMistral,
  kQwen2,
  kQwen3,
  kArcee,      // AFM: relu2 without a gate
  kPhoneLm,    // rotations are rounded, see rotary.h
  kProSparse,  // FATReLU
  kBamboo,     // dReLU; TurboSparse too
  kMiniCpm,    // FATReLU in MiniCPM-S; scaled embeddings, residuals and logits
};

// Scaling of rotary frequencies for contexts longer than in pretraining: transformers' rope_type
// and its parameters.
enum class RopeType {
  kDefault,
  kLinear,   // all frequencies divided by factor
  kDynamic,  // no change within the context, which no sequence exceeds
  kLlama3,   // low frequencies divided by factor, a ramp between the two limits
  kYarn,     // as kLlama3 with limits in rotations; cos and sin are scaled too
};
struct RopeScaling {
  RopeType type = RopeType::kDefault;
  double factor = 1.0;
  int64_t original_context = 0;   // original_max_position_embeddings; llama3 and yarn
  double low_freq_factor = 1.0;   // llama3
  double high_freq_factor = 4.0;  // llama3
  double beta_fast = 32.0;        // yarn, rotations over the original context
  double beta_slow = 1.0;         // yarn
  double attention_factor = 0.0;  // yarn, on cos and sin; 0: derived from those below and factor
  double mscale = 0.0;            // yarn; 0: not given
  double mscale_all_dim = 0.0;    // yarn; 0: not given
  bool truncate = true;           // yarn: limits are rounded to whole dimensions
  bool operator==(const RopeScaling&) const = default;
};

struct ModelConfig {
  int64_t vocab_size = 0;       // V
  int64_t width = 0;            // D, hidden_size
  int64_t ffn = 0;              // F, intermediate_size, of any value
  int64_t layers = 0;           // L, num_hidden_layers
  int64_t heads = 0;            // H, num_attention_heads
  int64_t kv_heads = 0;         // num_key_value_heads, divides heads
  int64_t head_dim = 0;         // even
  int64_t context = 0;          // max_position_embeddings
  bool gated = true;            // false: no gate projection
  bool tied_embeddings = true;  // tie_word_embeddings
  double rope_theta = 10000.0;
  double norm_eps = 1e-5;
  double init_std = 0.02;  // initializer_range
  int64_t bos_token = -1;  // -1: none
  int64_t eos_token = -1;
  std::vector<int64_t> more_eos_tokens;  // further tokens that end a text

  Family family = Family::kLlama;
  Activation activation = Activation::kRelu;
  double activation_threshold = 0.0;  // hidden_act_param, of fatrelu; 0 with any other
  bool qkv_bias = false;              // on the query, key and value projections
  bool o_bias = false;    // on the attention's output projection too; only with qkv_bias
  bool mlp_bias = false;  // on the projections of the feed-forward layers
  bool qk_norm = false;   // RMSNorm over each head of queries and keys, before the rotation
  RopeScaling rope_scaling;
  // Keys that a token attends to, its own included, in layers with a window; 0: no layer has one.
  int64_t sliding_window = 0;
  // [L] whether a layer attends to all keys although there is a window; empty: no layer does.
  std::vector<bool> full_attention;

  // MiniCPM's scales: embeddings times scale_emb, what a layer's two parts add to the residual
  // stream times scale_depth / sqrt(L), logits times dim_model_base / D. No other family has them.
  double embedding_scale = 1.0;
  double depth_scale = 0.0;  // 0: the parts are not scaled
  int64_t base_width = 0;    // 0: the logits are not scaled

  // Throws InputError, with the values, on anything that cannot be a model.
  void validate() const;
  int64_t q_width() const { return heads * head_dim; }      // H * hd
  int64_t kv_width() const { return kv_heads * head_dim; }  // H_kv * hd
  // The sliding window of a layer; 0: it attends to all keys.
  int64_t window_of(int64_t layer) const {
    const bool full = !full_attention.empty() && full_attention[static_cast<size_t>(layer)];
    return full ? 0 : sliding_window;
  }
  // The engine keeps the residual stream divided by the scale of the parts, which nothing has to be
  // multiplied by then: norms with an eps divided by its square make the same of it.
  bool scaled() const { return embedding_scale != 1.0 || depth_scale != 0.0 || base_width != 0; }
  double part_scale() const;
  float stream_embedding_scale() const {
    return static_cast<float>(embedding_scale / part_scale());
  }
  float stream_eps() const { return static_cast<float>(norm_eps / (part_scale() * part_scale())); }
  // The output of the last norm is multiplied by this before the head.
  float hidden_scale() const {
    return base_width == 0 ? 1.0f : static_cast<float>(base_width) / static_cast<float>(width);
  }
  BlendedActivation blended_activation() const {
    return {.kind = activation, .threshold = static_cast<float>(activation_threshold)};
  }
  int64_t parameter_count() const;
  // Forward FLOPs per token, averaged over a sequence of `seq` tokens, dense (2 per multiply-add).
  double forward_flops_per_token(int64_t seq) const;
  bool operator==(const ModelConfig&) const = default;
};

// "tiny", "0.5b", "1b", "1.5b", "2b"; InputError lists the names. A model that is not gated gets a
// wider FFN, so that both variants have about the same number of parameters.
ModelConfig preset_config(std::string_view name, bool gated = true);
std::vector<std::string> preset_names();

}  // namespace twell
