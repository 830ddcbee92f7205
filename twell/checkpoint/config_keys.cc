// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/config_keys.h"

#include <algorithm>
#include <string_view>

namespace twell {
namespace {

using nlohmann::json;

// What parse_config reads.
constexpr std::string_view kRead[] = {"model_type",
                                      "architectures",
                                      "vocab_size",
                                      "hidden_size",
                                      "intermediate_size",
                                      "num_hidden_layers",
                                      "num_attention_heads",
                                      "num_key_value_heads",
                                      "head_dim",
                                      "max_position_embeddings",
                                      "original_max_position_embeddings",
                                      "hidden_act",
                                      "mlp_gated",
                                      "tie_word_embeddings",
                                      "rope_theta",
                                      "rope_scaling",
                                      "rope_parameters",
                                      "rms_norm_eps",
                                      "initializer_range",
                                      "bos_token_id",
                                      "eos_token_id",
                                      "sliding_window",
                                      "use_sliding_window",
                                      "max_window_layers",
                                      "layer_types"};

// What no forward pass depends on: bookkeeping, other frameworks, dropout in training, and the
// generation settings that old versions of transformers kept here.
constexpr std::string_view kIgnored[] = {"_attn_implementation",
                                         "_attn_implementation_autoset",
                                         "_name_or_path",
                                         "attention_dropout",
                                         "attn_implementation",
                                         "auto_map",
                                         "bad_words_ids",
                                         "begin_suppress_tokens",
                                         "chunk_size_feed_forward",
                                         "cross_attention_hidden_size",
                                         "decoder_start_token_id",
                                         "diversity_penalty",
                                         "do_sample",
                                         "dtype",
                                         "early_stopping",
                                         "encoder_no_repeat_ngram_size",
                                         "exponential_decay_length_penalty",
                                         "finetuning_task",
                                         "forced_bos_token_id",
                                         "forced_eos_token_id",
                                         "id2label",
                                         "is_decoder",
                                         "is_llama_config",
                                         "label2id",
                                         "length_penalty",
                                         "max_length",
                                         "min_length",
                                         "model_max_length",
                                         "no_repeat_ngram_size",
                                         "num_beam_groups",
                                         "num_beams",
                                         "num_return_sequences",
                                         "output_attentions",
                                         "output_hidden_states",
                                         "output_scores",
                                         "pad_token_id",
                                         "prefix",
                                         "pretraining_tp",
                                         "problem_type",
                                         "remove_invalid_values",
                                         "repetition_penalty",
                                         "return_dict",
                                         "return_dict_in_generate",
                                         "sep_token_id",
                                         "suppress_tokens",
                                         "task_specific_params",
                                         "temperature",
                                         "tf_legacy_loss",
                                         "tie_encoder_decoder",
                                         "tokenizer_class",
                                         "top_k",
                                         "top_p",
                                         "torch_dtype",
                                         "torchscript",
                                         "transformers.js_config",
                                         "transformers_version",
                                         "typical_p",
                                         "unk_token_id",
                                         "unsloth_fixed",
                                         "unsloth_version",
                                         "use_bfloat16",
                                         "use_cache"};

// What may be there with the value that changes nothing.
struct Fixed {
  std::string_view key;
  bool value;  // as a number: 1 or 0
  std::string_view why;
};
constexpr Fixed kFixed[] = {{"attention_bias", false, "only the biases of Qwen2 are"},
                            {"mlp_bias", false, "feed-forward layers have no biases"},
                            {"add_cross_attention", false, "only decoders are"},
                            {"is_encoder_decoder", false, "only decoders are"},
                            {"rope_interleaved", false, "heads rotate in halves"},
                            {"use_mrope", false, "positions have one dimension"},
                            {"partial_rotary_factor", true, "heads rotate as a whole"}};

template <typename Range>
bool contains(const Range& keys, std::string_view key) {
  return std::find(std::begin(keys), std::end(keys), key) != std::end(keys);
}

bool is_fixed(const Fields& fields, std::string_view key, const json& value) {
  const auto it = std::find_if(std::begin(kFixed), std::end(kFixed),
                               [&](const Fixed& fixed) { return fixed.key == key; });
  if (it == std::end(kFixed)) return false;
  const bool same = value.is_null() || (value.is_boolean() && value.get<bool>() == it->value) ||
                    (value.is_number() && value.get<double>() == (it->value ? 1.0 : 0.0));
  TWELL_REQUIRE(same, "{}: {} {} is not supported: {}", fields.source(), key, Fields::show(value),
                it->why);
  return true;
}

void require_published_layout(const Fields& fields) {
  // That kernel keeps down_proj transposed, in a file of the same names.
  TWELL_REQUIRE(!fields.boolean("sparsity_use_hybrid_kernel", false),
                "{}: sparsity_use_hybrid_kernel true stores down_proj transposed, which is not "
                "supported; save the model with it set to false",
                fields.source());
}

}  // namespace

void require_known_keys(const Fields& fields, const FamilySpec& family) {
  TWELL_REQUIRE(fields.find("quantization_config") == nullptr,
                "{}: quantization_config is not supported; use the unquantized checkpoint",
                fields.source());
  if (family.sparse) require_published_layout(fields);
  for (const auto& [key, value] : fields.object().items()) {
    if (contains(kRead, key) || contains(kIgnored, key) || is_fixed(fields, key, value)) continue;
    if (key == "quantization_config" || (family.sparse && key.starts_with("sparsity_"))) continue;
    throw InputError(fmt::format(
        "{}: {} ({}) is not understood; remove it if it does not change what the model computes",
        fields.source(), key, Fields::show(value)));
  }
}

}  // namespace twell
