// SPDX-License-Identifier: Apache-2.0
#include "twell/train/start.h"

#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "twell/base/error.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/config_json.h"
#include "twell/train/run.h"
#include "twell/train/trainer_state.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

constexpr const char* kDefaultPreset = "tiny";

// Replaces each name of config.json in a message by that of its flag.
std::string in_words_of_flags(std::string message) {
  static constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"hidden_size", "--width"},
      {"intermediate_size", "--ffn"},
      {"num_hidden_layers", "--layers"},
      {"num_attention_heads", "--heads"},
      {"num_key_value_heads", "--kv-heads"},
      {"head_dim", "--head-dim"},
      {"max_position_embeddings", "--context"},
      {"vocab_size", "--vocab-size"},
      {"rope_theta", "--rope-theta"},
      {"rms_norm_eps", "--norm-eps"},
      {"initializer_range", "--init-std"}};
  for (const auto& [key, flag] : kNames) {
    if (const size_t at = message.find(key); at != std::string::npos) {
      message.replace(at, key.size(), flag);
    }
  }
  return message;
}

template <typename T>
void override_with(const std::optional<T>& setting, T& value) {
  if (setting) value = *setting;
}

ModelConfig config_of_preset(const RunSettings& settings) {
  ModelConfig config =
      preset_config(settings.preset.value_or(kDefaultPreset), settings.gated.value_or(true));
  override_with(settings.width, config.width);
  override_with(settings.ffn, config.ffn);
  override_with(settings.layers, config.layers);
  override_with(settings.heads, config.heads);
  if (settings.heads) config.kv_heads = config.heads;
  override_with(settings.kv_heads, config.kv_heads);
  if (settings.head_dim) {
    config.head_dim = *settings.head_dim;
  } else if ((settings.width || settings.heads) && config.heads > 0) {
    TWELL_REQUIRE(config.width % config.heads == 0,
                  "width {} is not a multiple of {} heads; give --head-dim", config.width,
                  config.heads);
    config.head_dim = config.width / config.heads;
  }
  override_with(settings.context, config.context);
  override_with(settings.vocab_size, config.vocab_size);
  override_with(settings.gated, config.gated);
  override_with(settings.tied, config.tied_embeddings);
  if (settings.activation) {
    config.activation = parse_activation(*settings.activation, "--activation");
  }
  override_with(settings.rope_theta, config.rope_theta);
  override_with(settings.norm_eps, config.norm_eps);
  override_with(settings.init_std, config.init_std);
  try {
    config.validate();
  } catch (const InputError& error) {
    throw InputError(in_words_of_flags(error.what()));
  }
  return config;
}

DType dtype_of(std::string_view name) {
  if (name == "f32") return DType::kF32;
  return name == "bf16" ? DType::kBF16 : DType::kF16;
}

// Turns the default L1 off for an activation that leaves no zeros, where L1 would only shrink
// activations.
void join_l1(const RunSettings& settings, const ModelConfig& config, RequestedOptions& requested) {
  override_with(settings.l1, requested.options.l1_coeff);
  if (leaves_zeros(config.activation)) return;
  const std::string name(activation_name(config.activation));
  const char* const remedy = settings.from.empty() ? "take --activation relu" : "add --relufy";
  TWELL_REQUIRE(!settings.l1 || *settings.l1 == 0.0,
                "--l1 makes no layer sparse with {}, which leaves no zeros: {}, or leave --l1 out",
                name, remedy);
  requested.options.l1_coeff = 0.0;
  if (settings.l1) return;
  requested.note =
      fmt::format("{} leaves no zeros: the model stays dense, and L1 is off; for a sparse one {}",
                  name, remedy);
}

// The options in which `config` differs from that of a saved model, with both values.
std::string differing_options(const ModelConfig& config, const ModelConfig& saved) {
  const nlohmann::json here = config_to_json(config), there = config_to_json(saved);
  std::vector<std::string> differences;
  for (const auto& [key, value] : here.items()) {
    const std::string other = there.contains(key) ? there[key].dump() : "unset";
    if (value.dump() == other) continue;
    differences.push_back(
        fmt::format("{} {}, there {}", in_words_of_flags(key), value.dump(), other));
  }
  return fmt::format("{}", fmt::join(differences, "; "));
}

std::unique_ptr<Model> make_model(Context& ctx, const RunSettings& settings,
                                  const ModelConfig& config, uint64_t seed,
                                  const std::optional<Checkpoint>& resume_from,
                                  const LoadOptions& load) {
  if (resume_from) {
    auto model = load_model(ctx, resume_from->folder, load);
    TWELL_REQUIRE(model->config == config, "the options describe another model than {}: {}",
                  resume_from->folder.string(), differing_options(config, model->config));
    return model;
  }
  if (!settings.from.empty()) {
    auto model = load_model(ctx, settings.from, load);
    model->set_activation(config.activation);
    return model;
  }
  auto model = std::make_unique<Model>(config);
  init_weights(ctx, *model, seed);
  return model;
}

}  // namespace

ModelConfig requested_config(const RunSettings& settings) {
  if (settings.from.empty()) {
    TWELL_REQUIRE(!settings.relufy && settings.train.distill == 0.0,
                  "--relufy and --distill start from a model: add --from DIR");
    return config_of_preset(settings);
  }
  TWELL_REQUIRE(!settings.sets_model(),
                "--from takes the model from the checkpoint; leave the options of the model out");
  ModelConfig config = load_config(settings.from);
  if (settings.relufy) config.activation = Activation::kRelu;
  return config;
}

RequestedOptions requested_options(const RunSettings& settings, const ModelConfig& config) {
  TWELL_REQUIRE(!settings.steps || !settings.tokens, "give --steps or --tokens, not both");
  RequestedOptions requested{.options = settings.train, .note = {}};
  TrainOptions& options = requested.options;
  if (settings.preset) {
    const TrainOptions recipe = preset_train_options(*settings.preset);
    options.steps = recipe.steps;
    options.batch_tokens = recipe.batch_tokens;
  }
  override_with(settings.steps, options.steps);
  override_with(settings.tokens, options.tokens);
  override_with(settings.batch_tokens, options.batch_tokens);
  const bool chats = !settings.chat_data.empty();
  TWELL_REQUIRE(chats || settings.chat_template.empty(), "--chat-template goes with --chat-data");
  TWELL_REQUIRE(!chats || !settings.from.empty(),
                "--chat-data trains a model on that has learned from text: add --from DIR");
  if (chats) options.document_mask = true;  // a conversation is a document
  options.schedule = parse_schedule(settings.schedule);
  options.l1_reduction = parse_l1_reduction(settings.l1_reduction);
  options.ffn_policy = parse_ffn_train_policy(settings.ffn_policy);
  options.save_dtype = dtype_of(settings.save_dtype);
  options.optimizer = parse_optimizer(settings.optimizer);
  options.compute = parse_matmul_compute(settings.compute);
  options.moment_dtype = dtype_of(settings.moment_dtype);
  options.gradient_dtype = dtype_of(settings.gradient_dtype);
  options.recompute = parse_recompute(settings.recompute);
  if (settings.relufy) {
    options.relufy_from = load_config(settings.from).activation;
    TWELL_REQUIRE(!leaves_zeros(options.relufy_from), "{} has {} already: leave --relufy out",
                  settings.from.string(), activation_name(options.relufy_from));
  }
  TWELL_REQUIRE(settings.relufy || options.relufy_steps == 0, "--relufy-steps goes with --relufy");
  join_l1(settings, config, requested);
  return requested;
}

ModelConfig match_tokenizer(const RunSettings& settings, ModelConfig config,
                            const Tokenizer& tokenizer) {
  if (settings.from.empty()) {
    if (!settings.vocab_size) config.vocab_size = tokenizer.vocab_size();
    config.eos_token = tokenizer.eos_token();
  }
  check_tokenizer(config, tokenizer);
  config.validate();
  return config;
}

TrainOptions resumed_options(TrainOptions requested, const ModelConfig& config,
                             const Checkpoint& resume_from) {
  const TrainOptions options = resolve_options(requested, config);
  TWELL_REQUIRE(resume_from.step <= options.steps,
                "the run has done {} steps already, more than the {} asked for: give --steps a "
                "larger number, or go back with --resume-from STEP",
                resume_from.step, options.steps);
  if (requested.warmup_steps < 0) {
    requested.warmup_steps = saved_option(resume_from.folder, "warmup-steps");
  }
  if (requested.batch_tokens == 0) {
    requested.batch_tokens = saved_option(resume_from.folder, "batch-tokens");
  }
  return resolve_options(requested, config);
}

StartedRun::StartedRun(Context& ctx, const RunSettings& settings, const ModelConfig& config,
                       const TrainOptions& requested, const std::optional<Checkpoint>& resume_from,
                       const LoadOptions& load)
    : options_(resume_from ? resumed_options(requested, config, *resume_from)
                           : resolve_options(requested, config)),
      model_(make_model(ctx, settings, config, options_.seed, resume_from, load)) {
  if (options_.distill > 0.0) teacher_ = load_model(ctx, settings.from, load);
  const fs::path& origin = resume_from ? resume_from->folder : settings.from;
  if (!origin.empty()) text_files_ = text_files_of(origin);
}

void StartedRun::make_engine(Context& ctx, const RunDevice& device, const TrainingData& data,
                             Communicator* ranks) {
  engine_ = device.engine(ctx, *model_, data, options_, teacher_.get(), ranks);
}

}  // namespace twell
