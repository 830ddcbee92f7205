// SPDX-License-Identifier: Apache-2.0
// Reads and writes config.json: families, fields, known keys, rotary keys, and other layouts.
#include "twell/checkpoint/config_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/base/json.h"
#include "twell/base/json_fields.h"
#include "twell/checkpoint/quantization.h"

namespace twell {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr size_t kMaxBytes = size_t{1} << 20;  // published files are a few KiB
constexpr int kConfigDepth = 16;
constexpr int64_t kMaxListedLayers = int64_t{1} << 16;  // bounds what a hostile file allocates

// The families.

// A family's names in config.json, the features of its layers, and transformers' defaults for
// absent keys. All families use Llama's tensor names (parameter_table).
struct FamilySpec {
  Family family = Family::kLlama;
  std::string_view model_type;    // of config.json
  std::string_view architecture;  // of config.json
  // A published sparse model: ReLU regardless of hidden_act, sparsity_* keys, tracker tensors.
  bool sparse = false;
  bool qkv_bias = false;
  bool qk_norm = false;
  bool attention_bias = false;  // has this key: biases on all projections of the attention
  bool mlp_bias = false;        // has this key
  int64_t context = 2048;       // max_position_embeddings
  int64_t kv_heads = 0;         // num_key_value_heads; 0: as many as heads
  int64_t head_dim = 0;         // 0: hidden_size / num_attention_heads
  int64_t window = 0;           // sliding_window when the key is absent; 0: none
  bool window_switch = false;   // the window applies only with use_sliding_window
  bool gated = true;            // false: no layer has a gate, and there is no mlp_gated
  std::string_view hidden_act = "silu";
  bool up_relu = false;    // hidden_act is of both projections: "relu" is dReLU
  double norm_eps = 1e-6;  // rms_norm_eps
  bool tied = false;       // tie_word_embeddings
  bool scaled = false;     // has scale_emb, scale_depth and dim_model_base, each 1 when absent
};
constexpr FamilySpec kFamilies[] = {
    {.family = Family::kLlama,
     .model_type = "llama",
     .architecture = "LlamaForCausalLM",
     .attention_bias = true,
     .mlp_bias = true},
    {.family = Family::kLlama,
     .model_type = "llama_sparse_relu",
     .architecture = "SparseLlamaForCausalLM",
     .sparse = true,
     .attention_bias = true,
     .mlp_bias = true},
    {.family = Family::kMistral,
     .model_type = "mistral",
     .architecture = "MistralForCausalLM",
     .context = 131072,
     .kv_heads = 8,
     .window = 4096},
    {.family = Family::kQwen2,
     .model_type = "qwen2",
     .architecture = "Qwen2ForCausalLM",
     .qkv_bias = true,
     .context = 32768,
     .kv_heads = 32,
     .window = 4096,
     .window_switch = true},
    {.family = Family::kQwen2,
     .model_type = "qwen2_sparse_relu",
     .architecture = "SparseQwen2ForCausalLM",
     .sparse = true,
     .qkv_bias = true,
     .context = 32768,
     .kv_heads = 32,
     .window = 4096,
     .window_switch = true},
    {.family = Family::kQwen3,
     .model_type = "qwen3",
     .architecture = "Qwen3ForCausalLM",
     .qk_norm = true,
     .attention_bias = true,
     .context = 32768,
     .kv_heads = 32,
     .head_dim = 128,
     .window = 4096,
     .window_switch = true},
    {.family = Family::kArcee,
     .model_type = "arcee",
     .architecture = "ArceeForCausalLM",
     .attention_bias = true,
     .mlp_bias = true,
     .context = 4096,
     .gated = false,
     .hidden_act = "relu2",
     .norm_eps = 1e-5},
    {.family = Family::kPhoneLm,
     .model_type = "phonelm",
     .architecture = "PhoneLMForCausalLM",
     .attention_bias = true},
    {.family = Family::kProSparse,
     .model_type = "sparsellama",
     .architecture = "SparseLlamaForCausalLM",
     .attention_bias = true,
     .mlp_bias = true},
    {.family = Family::kBamboo,
     .model_type = "bamboo",
     .architecture = "BambooForCausalLM",
     .context = 32768,
     .kv_heads = 8,
     .window = 4096,
     .up_relu = true},
    {.family = Family::kMiniCpm,
     .model_type = "minicpm",
     .architecture = "MiniCPMForCausalLM",
     .attention_bias = true,
     .tied = true,
     .scaled = true},
};

// InputError names the source and the supported families.
const FamilySpec& family_of_model_type(std::string_view model_type, const std::string& source) {
  std::string known;
  for (const FamilySpec& spec : kFamilies) {
    if (spec.model_type == model_type) return spec;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", spec.model_type);
  }
  throw InputError(fmt::format("{}: model_type \"{}\" is not supported; supported are {}", source,
                               model_type, known));
}

// InputError for a sparse layout that was never published.
const FamilySpec& family_spec(Family family, bool sparse = false) {
  const FamilySpec* plain = nullptr;
  for (const FamilySpec& spec : kFamilies) {
    if (spec.family != family) continue;
    if (spec.sparse == sparse) return spec;
    plain = &spec;
  }
  TWELL_CHECK(plain != nullptr, "a family without a row in the table");
  throw InputError(fmt::format("{} models have no published sparse layout", plain->model_type));
}

// The keys, in lists with spaces between them.

bool lists(std::string_view keys, std::string_view key) {
  if (key.empty() || key.find(' ') != key.npos) return false;
  const std::string list = fmt::format(" {} ", keys);
  return list.find(fmt::format(" {} ", key)) != list.npos;
}

// Keys that parse_config reads.
constexpr std::string_view kRead =
    "model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers "
    "num_attention_heads num_key_value_heads head_dim max_position_embeddings "
    "original_max_position_embeddings hidden_act hidden_act_param mlp_gated tie_word_embeddings "
    "rope_theta "
    "rope_scaling rope_parameters rms_norm_eps initializer_range bos_token_id eos_token_id "
    "sliding_window use_sliding_window max_window_layers layer_types";

// Keys of families with `scaled`.
constexpr std::string_view kScales = "scale_emb scale_depth dim_model_base";

// Keys that the forward pass does not depend on: bookkeeping, other frameworks, dropout, and the
// generation settings that old versions of transformers stored here.
constexpr std::string_view kIgnored =
    "_attn_implementation _attn_implementation_autoset _name_or_path attention_dropout "
    "attn_implementation auto_map bad_words_ids begin_suppress_tokens chunk_size_feed_forward "
    "cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype "
    "early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty "
    "finetuning_task forced_bos_token_id forced_eos_token_id id2label is_decoder "
    "is_llama_config label2id length_penalty max_length min_length model_max_length "
    "no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions "
    "output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type "
    "remove_invalid_values repetition_penalty return_dict return_dict_in_generate "
    "sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss "
    "tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript "
    "transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed "
    "unsloth_version use_bfloat16 use_cache";

// Keys that are accepted only with their neutral value.
struct Fixed {
  std::string_view key;
  bool value;  // as a number: 1 or 0
  std::string_view why;
};
constexpr Fixed kFixed[] = {
    {"attention_bias", false, "the family has no such biases"},
    {"mlp_bias", false, "the family's feed-forward layers have no biases"},
    {"add_cross_attention", false, "only decoder models are supported"},
    {"is_encoder_decoder", false, "only decoder models are supported"},
    {"rope_interleaved", false, "rotary embeddings pair the two halves of a head"},
    {"use_mrope", false, "positions have one dimension"},
    {"partial_rotary_factor", true, "rotary embeddings cover the whole head"}};

bool is_fixed(const JsonFields& fields, std::string_view key, const json& value) {
  const auto it = std::find_if(std::begin(kFixed), std::end(kFixed),
                               [&](const Fixed& fixed) { return fixed.key == key; });
  if (it == std::end(kFixed)) return false;
  const bool same = value.is_null() || (value.is_boolean() && value.get<bool>() == it->value) ||
                    (value.is_number() && value.get<double>() == (it->value ? 1.0 : 0.0));
  TWELL_REQUIRE(same, "{}: {} {} is not supported: {}", fields.where(), key, show(value), it->why);
  return true;
}

void require_published_layout(const JsonFields& fields) {
  // That kernel's checkpoints store down_proj transposed under the same tensor name.
  TWELL_REQUIRE(!fields.boolean("sparsity_use_hybrid_kernel", false),
                "{}: sparsity_use_hybrid_kernel true stores down_proj transposed, which is not "
                "supported; save the model with it set to false",
                fields.where());
}

// InputError names the first key that is unknown or requests an unsupported feature: an unknown key
// might change the model.
void require_known_keys(const JsonFields& fields, const FamilySpec& family) {
  parse_quantization(fields);  // refuses schemes that are not supported
  if (family.sparse) require_published_layout(fields);
  for (const auto& [key, value] : fields.value().items()) {
    if ((key == "attention_bias" && family.attention_bias) ||
        (key == "mlp_bias" && family.mlp_bias) || (family.scaled && lists(kScales, key))) {
      continue;
    }
    if (lists(kRead, key) || lists(kIgnored, key) || is_fixed(fields, key, value)) continue;
    if (key == "quantization_config" || (family.sparse && key.starts_with("sparsity_"))) continue;
    throw InputError(fmt::format(
        "{}: {} ({}) is not understood; remove it if it does not change what the model computes",
        fields.where(), key, show(value)));
  }
}

// The rotary keys. Older files have rope_theta next to rope_scaling (null when plain), newer ones
// both inside rope_parameters.

constexpr std::pair<RopeType, const char*> kRopeTypes[] = {{RopeType::kDefault, "default"},
                                                           {RopeType::kLinear, "linear"},
                                                           {RopeType::kDynamic, "dynamic"},
                                                           {RopeType::kLlama3, "llama3"},
                                                           {RopeType::kYarn, "yarn"}};

constexpr std::string_view kRopeKeys =
    "rope_type type rope_theta factor original_max_position_embeddings low_freq_factor "
    "high_freq_factor beta_fast beta_slow attention_factor mscale mscale_all_dim truncate "
    "partial_rotary_factor";

RopeType parse_rope_type(const std::string& name, const char* key, const std::string& source) {
  for (const auto& [type, known] : kRopeTypes) {
    if (name == known) return type;
  }
  throw InputError(
      fmt::format("{}: {} of type \"{}\" is not supported; supported are default, linear, dynamic, "
                  "llama3 and yarn",
                  source, key, name));
}

// transformers takes a beta_fast or beta_slow of 0 as its default.
double positive_or(double value, double fallback) { return value == 0.0 ? fallback : value; }

void read_rope_object(const char* key, const JsonFields& rope, ModelConfig& config) {
  const std::string& source = rope.where();
  for (const auto& [inner, value] : rope.value().items()) {
    TWELL_REQUIRE(lists(kRopeKeys, inner), "{}: {} of {} ({}) is not understood", source, inner,
                  key, show(value));
  }
  TWELL_REQUIRE(rope.number("partial_rotary_factor", 1.0) == 1.0,
                "{}: partial_rotary_factor other than 1 is not supported", source);
  config.rope_theta = rope.number("rope_theta", config.rope_theta);
  RopeScaling& out = config.rope_scaling;
  out.type = parse_rope_type(rope.text("rope_type", rope.text("type", "default")), key, source);
  if (out.type == RopeType::kDefault) return;
  const bool relative = out.type == RopeType::kLlama3 || out.type == RopeType::kYarn;
  if (relative) {
    // The configuration's own key takes precedence, as in transformers.
    const int64_t own = rope.integer("original_max_position_embeddings", config.context);
    out.original_context = out.original_context > 0 ? out.original_context : own;
  }
  const bool from_contexts = out.type == RopeType::kYarn && out.original_context > 0;
  TWELL_REQUIRE(rope.find("factor") != nullptr || from_contexts, "{}: factor of {} is missing",
                source, key);
  const double ratio = from_contexts ? static_cast<double>(config.context) /
                                           static_cast<double>(out.original_context)
                                     : 1.0;
  out.factor = rope.number("factor", ratio);
  if (out.type == RopeType::kLlama3) {
    out.low_freq_factor = rope.number("low_freq_factor", out.low_freq_factor);
    out.high_freq_factor = rope.number("high_freq_factor", out.high_freq_factor);
  }
  if (out.type == RopeType::kYarn) {
    out.beta_fast = positive_or(rope.number("beta_fast", 0.0), out.beta_fast);
    out.beta_slow = positive_or(rope.number("beta_slow", 0.0), out.beta_slow);
    out.attention_factor = rope.number("attention_factor", 0.0);
    out.mscale = rope.number("mscale", 0.0);
    out.mscale_all_dim = rope.number("mscale_all_dim", 0.0);
    out.truncate = rope.boolean("truncate", true);
  }
}

// Sets rope_theta and rope_scaling of a configuration whose context is already set.
void read_rope(const JsonFields& fields, ModelConfig& config) {
  config.rope_theta = fields.number("rope_theta", 10000.0);
  config.rope_scaling = {};
  const int64_t original = fields.integer("original_max_position_embeddings", 0);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (fields.find(key) == nullptr) continue;
    config.rope_scaling = {.original_context = original};
    read_rope_object(key, JsonFields(fields.object(key), fields.where()), config);
    const RopeType type = config.rope_scaling.type;
    if (type != RopeType::kLlama3 && type != RopeType::kYarn) {
      config.rope_scaling.original_context = 0;
    }
  }
}

// The value of rope_scaling; null when plain.
json rope_scaling_to_json(const RopeScaling& rope) {
  if (rope.type == RopeType::kDefault) return nullptr;
  const auto named = std::find_if(std::begin(kRopeTypes), std::end(kRopeTypes),
                                  [&](const auto& one) { return one.first == rope.type; });
  json out = {{"rope_type", named->second}, {"factor", rope.factor}};
  if (rope.type == RopeType::kLlama3 || rope.type == RopeType::kYarn) {
    out["original_max_position_embeddings"] = rope.original_context;
  }
  if (rope.type == RopeType::kLlama3) {
    out["low_freq_factor"] = rope.low_freq_factor;
    out["high_freq_factor"] = rope.high_freq_factor;
  }
  if (rope.type == RopeType::kYarn) {
    out["beta_fast"] = rope.beta_fast;
    out["beta_slow"] = rope.beta_slow;
    out["truncate"] = rope.truncate;
    if (rope.attention_factor > 0.0) out["attention_factor"] = rope.attention_factor;
    if (rope.mscale > 0.0) out["mscale"] = rope.mscale;
    if (rope.mscale_all_dim > 0.0) out["mscale_all_dim"] = rope.mscale_all_dim;
  }
  return out;
}

// The configuration.

void require_architecture(const JsonFields& fields, const FamilySpec& family) {
  const json* architectures = fields.find("architectures");
  if (architectures == nullptr) return;
  const auto supported = [&](const json& name) {
    return name == family.architecture ||
           // Some published sparse models name the class from which they were derived.
           (family.sparse && name == family_spec(family.family).architecture);
  };
  TWELL_REQUIRE(
      architectures->is_array() && architectures->size() == 1 && supported(architectures->front()),
      "{}: architectures {} do not go with model_type \"{}\"; supported is {}", fields.where(),
      show(*architectures), family.model_type, family.architecture);
}

Activation read_activation(const JsonFields& fields, const FamilySpec& family) {
  // The published sparse models still say "silu", but their model type means ReLU.
  if (family.sparse) return Activation::kRelu;
  const std::string name = fields.text("hidden_act", std::string(family.hidden_act));
  const Activation activation = parse_activation(name, fields.where() + ": hidden_act");
  if (!family.up_relu) return activation;
  TWELL_REQUIRE(activation == Activation::kRelu,
                "{}: hidden_act \"{}\" is not supported with {}, whose layers have a ReLU on both "
                "projections; supported is relu",
                fields.where(), name, family.model_type);
  return Activation::kDRelu;
}

// FATReLU's threshold; a value beside another activation has no meaning.
double read_threshold(const JsonFields& fields, Activation activation) {
  if (activation != Activation::kFatRelu) return 0.0;
  TWELL_REQUIRE(fields.find("hidden_act_param") != nullptr,
                "{}: hidden_act_param, the threshold of fatrelu, is missing", fields.where());
  return fields.number("hidden_act_param", 0.0);
}

std::string_view hidden_act_of(const ModelConfig& config, const FamilySpec& family) {
  if (!family.up_relu) return activation_name(config.activation);
  TWELL_CHECK(config.activation == Activation::kDRelu, "a {} model with {}", family.model_type,
              activation_name(config.activation));
  return activation_name(Activation::kRelu);
}

void read_sizes(const JsonFields& fields, const FamilySpec& family, ModelConfig& config) {
  const std::string& source = fields.where();
  config.vocab_size = fields.integer("vocab_size");
  config.width = fields.integer("hidden_size");
  config.ffn = fields.integer("intermediate_size");
  config.layers = fields.integer("num_hidden_layers");
  config.heads = fields.integer("num_attention_heads");
  const bool absent = !fields.value().contains("num_key_value_heads");
  config.kv_heads = fields.integer("num_key_value_heads",
                                   absent && family.kv_heads > 0 ? family.kv_heads : config.heads);
  TWELL_REQUIRE(config.heads >= 1, "{}: num_attention_heads must be at least 1, got {}", source,
                config.heads);
  const bool derived = fields.find("head_dim") == nullptr && family.head_dim == 0;
  TWELL_REQUIRE(!derived || config.width % config.heads == 0,
                "{}: hidden_size {} is not a multiple of num_attention_heads {}, and head_dim is "
                "not given",
                source, config.width, config.heads);
  config.head_dim =
      fields.integer("head_dim", derived ? config.width / config.heads : family.head_dim);
  config.context = fields.integer("max_position_embeddings", family.context);
}

// Returns, per layer, whether it attends to all keys although the model has a window.
std::vector<bool> read_full_attention(const JsonFields& fields, const FamilySpec& family,
                                      const ModelConfig& config) {
  std::vector<bool> full;
  const json* types = fields.find("layer_types");
  if (types == nullptr) {
    const int64_t first = family.window_switch ? fields.integer("max_window_layers", 28) : 0;
    for (int64_t layer = 0; layer < config.layers; ++layer) full.push_back(layer < first);
    return full;
  }
  TWELL_REQUIRE(types->is_array() && std::ssize(*types) == config.layers,
                "{}: layer_types must be a list of {} kinds, one for each layer, got {}",
                fields.where(), config.layers, show(*types));
  for (const json& type : *types) {
    TWELL_REQUIRE(
        type == "full_attention" || (type == "sliding_attention" && config.sliding_window > 0),
        "{}: a layer of type {} is not supported", fields.where(), show(type));
    full.push_back(type == "full_attention");
  }
  return full;
}

void read_window(const JsonFields& fields, const FamilySpec& family, ModelConfig& config) {
  const bool given = fields.value().contains("sliding_window");
  config.sliding_window = fields.integer("sliding_window", given ? 0 : family.window);
  if (family.window_switch && !fields.boolean("use_sliding_window", false)) {
    config.sliding_window = 0;
  }
  if (family.window == 0) {
    TWELL_REQUIRE(config.sliding_window == 0, "{}: a sliding_window is not supported with {}",
                  fields.where(), family.model_type);
  }
  if (config.layers < 1 || config.layers > kMaxListedLayers) return;  // validate() refuses it
  const std::vector<bool> full = read_full_attention(fields, family, config);
  const auto count = std::count(full.begin(), full.end(), true);
  if (count == config.layers) config.sliding_window = 0;
  if (config.sliding_window == 0 || count == 0) return;
  TWELL_REQUIRE(family.window_switch,
                "{}: {} models have the sliding window in every layer, but layer_types names {} "
                "layers of full attention",
                fields.where(), family.model_type, count);
  config.full_attention = full;
}

void read_tokens(const JsonFields& fields, ModelConfig& config) {
  config.bos_token = fields.integer("bos_token_id", -1);
  const json* eos = fields.find("eos_token_id");
  if (eos == nullptr) return;
  if (!eos->is_array()) {
    config.eos_token = fields.integer("eos_token_id");
    return;
  }
  for (const json& token : *eos) {
    const json one = {{"eos_token_id", token}};
    const int64_t id = JsonFields(one, fields.where()).integer("eos_token_id");
    if (config.eos_token < 0) {
      config.eos_token = id;
    } else {
      config.more_eos_tokens.push_back(id);
    }
  }
}

// In the published sparse models the sparsity_* keys override the FFN's usual keys.
void read_sparsity(const JsonFields& fields, ModelConfig& config) {
  config.gated = fields.boolean("sparsity_gated_mlp", config.gated);
  config.ffn = fields.integer("sparsity_new_intermediate_size", config.ffn);
}

void read_scales(const JsonFields& fields, ModelConfig& config) {
  config.embedding_scale = fields.number("scale_emb", 1.0);
  config.depth_scale = fields.number("scale_depth", 1.0);
  config.base_width = fields.integer("dim_model_base", 1);
  TWELL_REQUIRE(config.depth_scale > 0.0 && config.base_width >= 1,
                "{}: scale_depth {} and dim_model_base {} must be above 0", fields.where(),
                config.depth_scale, config.base_width);
}

json eos_to_json(const ModelConfig& config) {
  if (config.eos_token < 0) return nullptr;
  if (config.more_eos_tokens.empty()) return config.eos_token;
  json out = {config.eos_token};
  for (const int64_t token : config.more_eos_tokens) out.push_back(token);
  return out;
}

// Other layouts.

void set_family(ordered_json& object, const FamilySpec& family) {
  object["model_type"] = family.model_type;
  if (object.contains("architectures")) object["architectures"] = {family.architecture};
}

// Adds the keys that the published sparse models have beyond those of their family.
void to_sparse(ordered_json& object, const ModelConfig& config, const std::string& source) {
  TWELL_REQUIRE(config.activation == Activation::kRelu,
                "{}: the sparse layout is for models with relu, this one has {}; sparsify it first "
                "('twell train --from DIR --relufy')",
                source, activation_name(config.activation));
  set_family(object, family_spec(config.family, /*sparse=*/true));
  object.erase("mlp_gated");
  object["sparsity_gated_mlp"] = config.gated;
}

void to_hugging_face(ordered_json& object, const ModelConfig& config) {
  set_family(object, family_spec(config.family));
  object["hidden_act"] = hidden_act_of(config, family_spec(config.family));
  object["intermediate_size"] = config.ffn;
  object.erase("auto_map");
  erase_keys(object, [](const std::string& key) { return key.starts_with("sparsity_"); });
  if (!config.gated) object["mlp_gated"] = false;
}

const char* torch_dtype_name(DType dtype) {
  if (dtype == DType::kF32) return "float32";
  return dtype == DType::kBF16 ? "bfloat16" : "float16";
}

void set_dtype(ordered_json& object, DType dtype) {
  // Older versions of transformers write torch_dtype, newer ones dtype.
  const char* key = object.contains("dtype") ? "dtype" : "torch_dtype";
  object[key] = torch_dtype_name(dtype);
}

}  // namespace

ModelConfig parse_config(const json& object, const std::string& source) {
  const JsonFields fields(object, source);
  const FamilySpec& family = family_of_model_type(fields.text("model_type", ""), source);
  require_architecture(fields, family);
  require_known_keys(fields, family);

  ModelConfig config;
  config.family = family.family;
  config.o_bias = family.attention_bias && fields.boolean("attention_bias", false);
  config.qkv_bias = family.qkv_bias || config.o_bias;
  config.mlp_bias = family.mlp_bias && fields.boolean("mlp_bias", false);
  config.qk_norm = family.qk_norm;
  config.activation = read_activation(fields, family);
  config.activation_threshold = read_threshold(fields, config.activation);
  read_sizes(fields, family, config);
  read_window(fields, family, config);
  read_rope(fields, config);
  read_tokens(fields, config);
  config.gated = fields.boolean("mlp_gated", family.gated);
  TWELL_REQUIRE(family.gated || !config.gated, "{}: {} models have no gate, but mlp_gated is true",
                source, family.model_type);
  if (family.sparse) read_sparsity(fields, config);
  if (family.scaled) read_scales(fields, config);
  config.tied_embeddings = fields.boolean("tie_word_embeddings", family.tied);
  config.norm_eps = fields.number("rms_norm_eps", family.norm_eps);
  config.init_std = fields.number("initializer_range", 0.02);
  try {
    config.validate();
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}", source, error.what()));
  }
  return config;
}

ModelConfig parse_config_text(std::string_view text, const std::string& source) {
  TWELL_REQUIRE(text.size() <= kMaxBytes, "{}: {} bytes are too many for a model configuration",
                source, text.size());
  return parse_config(parse_json(text, source, {.depth = kConfigDepth}), source);
}

json config_to_json(const ModelConfig& config) {
  const FamilySpec& family = family_spec(config.family);
  json object = {
      {"architectures", {family.architecture}},
      {"model_type", family.model_type},
      {"hidden_act", hidden_act_of(config, family)},
      {"vocab_size", config.vocab_size},
      {"hidden_size", config.width},
      {"intermediate_size", config.ffn},
      {"num_hidden_layers", config.layers},
      {"num_attention_heads", config.heads},
      {"num_key_value_heads", config.kv_heads},
      {"head_dim", config.head_dim},
      {"max_position_embeddings", config.context},
      {"tie_word_embeddings", config.tied_embeddings},
      {"rope_theta", config.rope_theta},
      {"rope_scaling", rope_scaling_to_json(config.rope_scaling)},
      {"rms_norm_eps", config.norm_eps},
      {"initializer_range", config.init_std},
      {"bos_token_id", config.bos_token < 0 ? json(nullptr) : json(config.bos_token)},
      {"eos_token_id", eos_to_json(config)},
  };
  if (family.attention_bias) object["attention_bias"] = config.o_bias;
  if (family.mlp_bias) object["mlp_bias"] = config.mlp_bias;
  if (family.window > 0) {
    object["sliding_window"] =
        config.sliding_window > 0 ? json(config.sliding_window) : json(nullptr);
  }
  if (family.window_switch) {
    object["use_sliding_window"] = config.sliding_window > 0;
    const std::vector<bool>& full = config.full_attention;
    const auto first = std::find(full.begin(), full.end(), false) - full.begin();
    object["max_window_layers"] = config.sliding_window > 0 ? int64_t{first} : config.layers;
    for (const bool is_full : full) {
      object["layer_types"].push_back(is_full ? "full_attention" : "sliding_attention");
    }
  }
  if (family.scaled) {
    object["scale_emb"] = config.embedding_scale;
    object["scale_depth"] = config.depth_scale;
    object["dim_model_base"] = config.base_width;
  }
  if (config.activation == Activation::kFatRelu) {
    object["hidden_act_param"] = config.activation_threshold;
  }
  if (!config.gated && family.gated) object["mlp_gated"] = false;
  return object;
}

std::string config_to_text(const ModelConfig& config, DType dtype) {
  json object = config_to_json(config);
  object["torch_dtype"] = torch_dtype_name(dtype);
  return object.dump(2) + "\n";
}

std::optional<ByteWeights> parse_weight_bytes(std::string_view text, const std::string& source) {
  const json object = parse_json(text, source, {.depth = kConfigDepth});
  return parse_quantization(JsonFields(object, source));
}

std::string convert_config(const std::string& text, const std::string& source,
                           CheckpointLayout layout, std::optional<DType> dtype,
                           std::optional<ByteWeights> bytes) {
  const ModelConfig config = parse_config_text(text, source);
  const ordered_json before = parse_ordered_json(text, source, {.depth = kConfigDepth});
  ordered_json object = before;
  const bool sparse = family_of_model_type(object["model_type"].get<std::string>(), source).sparse;
  if (layout == CheckpointLayout::kSparse && !sparse) to_sparse(object, config, source);
  if (layout == CheckpointLayout::kHuggingFace && sparse) to_hugging_face(object, config);
  if (dtype) set_dtype(object, *dtype);
  if (bytes) object["quantization_config"] = quantization_to_json(*bytes);
  if (bytes && bytes->head && config.tied_embeddings) object["tie_word_embeddings"] = false;
  // The format of Python's json.dumps(indent=2), which transformers uses.
  return object == before ? text : object.dump(2, ' ', /*ensure_ascii=*/true) + "\n";
}

}  // namespace twell
