// SPDX-License-Identifier: Apache-2.0
#include "cli/train_flags.h"

#include <fmt/ranges.h>

#include <string_view>

#include "twell/base/error.h"

namespace twell::cli {
namespace {

constexpr const char* kDefaultPreset = "tiny";

// One group of options of the command, in the order of its help.
class Group {
 public:
  Group(CLI::App& command, std::string name) : command_(command), name_(std::move(name)) {}

  template <typename T>
  CLI::Option* value(const std::string& flag, T& target, const std::string& type,
                     const std::string& help) {
    return command_.add_option(flag, target, help)
        ->type_name(type)
        ->capture_default_str()
        ->group(name_);
  }
  // Without a default of its own.
  template <typename T>
  CLI::Option* optional(const std::string& flag, std::optional<T>& target, const std::string& type,
                        const std::string& help) {
    return command_.add_option(flag, target, help)->type_name(type)->group(name_);
  }
  CLI::Option* choice(const std::string& flag, std::string& target,
                      const std::vector<std::string>& names, const std::string& help) {
    return value(flag, target, fmt::format("{}", fmt::join(names, "|")), help)
        ->check(CLI::IsMember(names).description(""));
  }
  CLI::Option* flag(const std::string& names, bool& target, const std::string& help) {
    return command_.add_flag(names, target, help)->group(name_);
  }
  // A flag with a negated spelling. Bound to an optional, CLI11 would count it instead.
  CLI::Option* choice_flag(const std::string& names, std::optional<bool>& target,
                           const std::string& help) {
    return command_.add_flag(names, help)
        ->each(
            [&target](const std::string& value) { target = CLI::detail::to_flag_value(value) > 0; })
        ->group(name_);
  }

 private:
  CLI::App& command_;
  std::string name_;
};

void add_run_flags(CLI::App& command, TrainFlags& flags) {
  Group run(command, "Run");
  run.flag("--resume", flags.resume,
           "Continue the run in --out where its newest checkpoint left it, bit for bit (same "
           "machine, --device and --threads); its options are remembered")
      ->configurable(false);
  run.flag("--dry-run", flags.dry_run,
           "Print parameters, memory, FLOPs and steps, and touch nothing")
      ->configurable(false);
  run.value("--from", flags.from, "DIR",
            "Start from the weights of this checkpoint, which decides the model");
  run.value("--save-every", flags.train.save_every, "STEPS",
            "Steps between checkpoints; 0: at the end only");
  run.value("--keep-last", flags.train.keep_last, "N", "Checkpoints to keep");
  run.choice("--save-dtype", flags.save_dtype, {"f32", "bf16", "f16"},
             "Type of the weights in model.safetensors");
  run.value("--validate-every", flags.train.validate_every, "STEPS",
            "Steps between validations; 0: never");
  run.value("--validation-sequences", flags.train.validation_sequences, "N",
            "Sequences of a validation, at most; spread evenly over the split");
  run.flag("--tensorboard", flags.tensorboard, "Also write TensorBoard events to OUT/tensorboard");
  run.value("--log-every", flags.log_interval, "SECONDS",
            "Time between progress lines when stdout is no terminal")
      ->check(CLI::Range(0.0, 1e6).description(""));
}

void add_model_flags(CLI::App& command, ModelFlags& flags) {
  Group model(command, "Model (default: the preset's)");
  model.optional("--preset", flags.preset, "NAME",
                 fmt::format("{} (default: {}); larger ones bring the steps and the batch of "
                             "their recipe",
                             fmt::join(preset_names(), ", "), kDefaultPreset));
  model.optional("--width", flags.width, "D", "Width of the residual stream");
  model.optional("--ffn", flags.ffn, "F", "Hidden neurons of a feed-forward layer");
  model.optional("--layers", flags.layers, "L", "Layers");
  model.optional("--heads", flags.heads, "H", "Attention heads");
  model.optional("--kv-heads", flags.kv_heads, "N", "Key/value heads (default: as --heads)");
  model.optional("--head-dim", flags.head_dim, "N", "Size of a head (default: width / heads)");
  model.optional("--context", flags.context, "T", "Longest sequence the model is for, in tokens");
  model.optional("--vocab-size", flags.vocab_size, "V",
                 "Vocabulary, also of a trained tokenizer (default with --tokenizer: its own)");
  model.choice_flag("--gated,!--no-gated", flags.gated,
                    "Feed-forward layers with a gate, or without");
  model.choice_flag("--tied,!--untied", flags.tied,
                    "One matrix for embedding and output head, or two");
  model.optional("--activation", flags.activation, "NAME",
                 "relu (default), silu, gelu, gelu_pytorch_tanh, quick_gelu; only relu is sparse");
  model.optional("--rope-theta", flags.rope_theta, "X", "Base of the rotary embedding");
  model.optional("--norm-eps", flags.norm_eps, "X", "Epsilon of RMSNorm");
  model.optional("--init-std", flags.init_std, "X", "Standard deviation of initial weights");
}

void add_optimizer_flags(CLI::App& command, TrainFlags& flags) {
  TrainOptions& train = flags.train;
  Group length(command, "Length and batch");
  length.optional("--steps", flags.steps, "N",
                  fmt::format("Optimizer steps (default: {})", train.steps));
  length.optional("--tokens", flags.tokens, "N", "Tokens to train on, instead of --steps");
  length.value("--sequence-length", train.sequence_length, "T",
               "Tokens of a sequence; 0: the context");
  length.value("--micro-batch", train.micro_batch, "N", "Sequences in memory at a time");
  length.optional("--batch-tokens", flags.batch_tokens, "N",
                  "Tokens of an optimizer step, gathered over micro-batches (default: one)");
  add_recompute_option(command, flags.recompute)->group("Length and batch");
  Group optimizer(command, "Optimizer (AdamW)");
  optimizer.value("--lr", train.learning_rate, "X", "Peak learning rate");
  optimizer.value("--min-lr-ratio", train.min_lr_ratio, "X",
                  "Share of the peak at which the cosine ends");
  optimizer.value("--warmup-steps", train.warmup_steps, "N",
                  "Linear warm-up; -1: 600, or a tenth of a shorter run");
  optimizer.value("--beta1", train.beta1, "X", "Decay of the first moment");
  optimizer.value("--beta2", train.beta2, "X", "Decay of the second moment");
  optimizer.value("--eps", train.eps, "X", "Added to the denominator");
  optimizer.value("--weight-decay", train.weight_decay, "X", "Of matrices; norms have none");
  optimizer.choice("--moment-dtype", flags.moment_dtype, {"f32", "bf16"},
                   "GPU: type of the moments in memory");
  optimizer.value("--clip", train.clip_norm, "X", "Largest gradient norm; 0: no clipping");
}

void add_sparsify_flags(CLI::App& command, TrainFlags& flags) {
  TrainOptions& train = flags.train;
  Group sparsify(command, "Sparsifying a model with another activation (--from)");
  sparsify.flag("--relufy", flags.relufy, "Replace the activation by ReLU and train on");
  sparsify.value("--relufy-steps", train.relufy_steps, "N",
                 "Steps over which ReLU takes over; 0: at once");
  sparsify.value("--distill", train.distill, "SHARE",
                 "Share of the loss that is the KL divergence from the original model; 0: none");
  sparsify.value("--tasks", flags.tasks.tasks, "NAMES",
                 "With --relufy: multiple-choice tasks, with commas between them, that both models "
                 "are put to at the end ('twell eval --help' has the names)");
  sparsify.value("--task-data", flags.tasks.data, "DIR",
                 "Folder with the tasks' data sets as JSON lines or Parquet");
  sparsify.value("--task-limit", flags.tasks.limit, "N", "Only the first items of each; 0: all");
}

void add_sparsity_flags(CLI::App& command, TrainFlags& flags) {
  TrainOptions& train = flags.train;
  Group sparsity(command, "Sparsity");
  sparsity.value("--l1", train.l1_coeff, "X", "L1 coefficient on hidden activations; 0: dense");
  sparsity.choice("--l1-reduction", flags.l1_reduction, {"sum", "mean"},
                  "Over the neurons of a layer: sum, or mean (the sum divided by F)");
  sparsity.value("--l1-zero-steps", train.l1_zero_steps, "N", "Steps before L1 sets in");
  sparsity.value("--l1-ramp-steps", train.l1_ramp_steps, "N",
                 "Steps after those in which it grows to --l1");
  sparsity.flag("--reinit-dead", train.reinit_dead,
                "After every step, move neurons that no token activated towards random weights");
  sparsity.value("--reinit-strength", train.reinit_strength, "X", "How far");
  sparsity.value("--reinit-std", train.reinit_std, "X", "Standard deviation of those weights");
  sparsity.choice("--ffn-policy", flags.ffn_policy, {"auto", "dense", "hybrid"},
                  "Execution of the feed-forward layers; auto: per layer, by measured activity");
}

template <typename T>
void override_with(const std::optional<T>& flag, T& value) {
  if (flag) value = *flag;
}

DType parse_save_dtype(std::string_view name) {
  if (name == "bf16") return DType::kBF16;
  if (name == "f16") return DType::kF16;
  return DType::kF32;
}

}  // namespace

bool ModelFlags::any() const {
  return preset || width || ffn || layers || heads || kv_heads || head_dim || context ||
         vocab_size || gated || tied || rope_theta || norm_eps || init_std || activation;
}

void add_train_flags(CLI::App& command, TrainFlags& flags) {
  add_run_flags(command, flags);
  add_text_options(command, flags.data);
  add_tokenizer_options(command, flags.data);
  Group(command, "Data")
      .value("--shards", flags.shards, "DIR",
             "Folder of shards to use, or to write --data to (default: "
             "OUT/shards); from 'twell tokenize'");
  add_model_flags(command, flags.model);
  add_optimizer_flags(command, flags);
  add_sparsity_flags(command, flags);
  add_sparsify_flags(command, flags);
}

CLI::Option* add_recompute_option(CLI::App& command, std::string& recompute) {
  return command
      .add_option(
          "--recompute", recompute,
          "GPU: what backward makes again to save memory: the blocks' normalised inputs "
          "(norms), the FFN's too (inputs), queries, keys and values too (qkv), the last named "
          "for N layers only; or the least of these that fits; the results are the same")
      ->type_name("auto|none|norms[:N]|inputs[:N]|qkv[:N]")
      ->capture_default_str();
}

ModelConfig model_config(const ModelFlags& flags) {
  ModelConfig config =
      preset_config(flags.preset.value_or(kDefaultPreset), flags.gated.value_or(true));
  override_with(flags.width, config.width);
  override_with(flags.ffn, config.ffn);
  override_with(flags.layers, config.layers);
  override_with(flags.heads, config.heads);
  if (flags.heads) config.kv_heads = config.heads;
  override_with(flags.kv_heads, config.kv_heads);
  if (flags.head_dim) {
    config.head_dim = *flags.head_dim;
  } else if ((flags.width || flags.heads) && config.heads > 0) {
    TWELL_REQUIRE(config.width % config.heads == 0,
                  "width {} is not a multiple of {} heads; give --head-dim", config.width,
                  config.heads);
    config.head_dim = config.width / config.heads;
  }
  override_with(flags.context, config.context);
  override_with(flags.vocab_size, config.vocab_size);
  override_with(flags.gated, config.gated);
  override_with(flags.tied, config.tied_embeddings);
  if (flags.activation) config.activation = parse_activation(*flags.activation, "--activation");
  override_with(flags.rope_theta, config.rope_theta);
  override_with(flags.norm_eps, config.norm_eps);
  override_with(flags.init_std, config.init_std);
  config.validate();
  return config;
}

TrainOptions train_options(const TrainFlags& flags, const CommonOptions& common) {
  TWELL_REQUIRE(!flags.steps || !flags.tokens, "give --steps or --tokens, not both");
  TWELL_REQUIRE(!flags.tokens || *flags.tokens > 0, "--tokens must be positive, got {}",
                *flags.tokens);
  TrainOptions options = flags.train;
  if (flags.model.preset) {
    const TrainOptions recipe = preset_train_options(*flags.model.preset);
    options.steps = recipe.steps;
    options.batch_tokens = recipe.batch_tokens;
  }
  override_with(flags.steps, options.steps);
  override_with(flags.tokens, options.tokens);
  override_with(flags.batch_tokens, options.batch_tokens);
  TWELL_REQUIRE(!flags.batch_tokens || *flags.batch_tokens > 0,
                "--batch-tokens must be positive, got {}", *flags.batch_tokens);
  options.l1_reduction = parse_l1_reduction(flags.l1_reduction);
  options.ffn_policy = parse_ffn_train_policy(flags.ffn_policy);
  options.save_dtype = parse_save_dtype(flags.save_dtype);
  options.moment_dtype = flags.moment_dtype == "bf16" ? DType::kBF16 : DType::kF32;
  options.recompute = parse_recompute(flags.recompute);
  options.seed = common.seed;
  return options;
}

}  // namespace twell::cli
