// SPDX-License-Identifier: Apache-2.0
#include "cli/train_flags.h"

#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <string_view>

#include "twell/base/error.h"
#include "twell/checkpoint/config_json.h"

namespace twell::cli {
namespace {

constexpr const char* kDefaultPreset = "tiny";

void add_run_flags(Command& command, TrainFlags& flags) {
  command.group("Run");
  command
      .flag("--resume", &flags.resume,
            "Continue the run in --out where its newest checkpoint left it, bit for bit (same "
            "machine, --device and --threads); its options are remembered")
      .not_in_files();
  Option& resume_from =
      command
          .value(
              "--resume-from", &flags.resume_from, "STEP",
              "Resume from the checkpoint of this step; later ones and their metrics are removed")
          .not_in_files();
  command
      .flag("--fall-back", &flags.fall_back,
            "Resume from the newest intact checkpoint where the newest is damaged")
      .not_in_files()
      .excludes(resume_from);
  command
      .flag("--dry-run", &flags.dry_run,
            "Print parameters, memory, FLOPs and steps, and touch nothing")
      .not_in_files();
  command.value("--from", &flags.from, "DIR",
                "Start from the weights of this checkpoint, which decides the model");
  command.value("--save-every", &flags.train.save_every, "STEPS",
                "Steps between checkpoints; 0: at the end only");
  command.value("--keep-last", &flags.train.keep_last, "N", "Checkpoints to keep");
  command.choice("--save-dtype", &flags.save_dtype, {"f32", "bf16", "f16"},
                 "Type of the weights in model.safetensors");
  command.value("--validate-every", &flags.train.validate_every, "STEPS",
                "Steps between validations; 0: never");
  command.value("--validation-sequences", &flags.train.validation_sequences, "N",
                "Sequences of a validation, at most; spread evenly over the split");
  command.flag("--tensorboard", &flags.tensorboard,
               "Also write TensorBoard events to OUT/tensorboard");
  command
      .value("--log-every", &flags.log_interval, "SECONDS",
             "Time between progress lines when stdout is no terminal")
      .range(0, 1e6);
}

void add_rank_flags(Command& command, TrainFlags& flags) {
  command.group("Several processes (docs/distributed.md)");
  Option& gpus =
      command
          .value("--gpus", &flags.gpus, "N",
                 "Train on N GPUs of this machine, with a process for each; torchrun, srun and "
                 "mpirun start processes on several machines")
          .range(1, 1024)
          .hide_default()
          .not_in_files();
  command.value("--ranks", &flags.ranks, "N", "Train with N processes on this machine's CPU")
      .range(1, 1024)
      .hide_default()
      .not_in_files()
      .excludes(gpus);
  command
      .value("--collective-timeout", &flags.collective_timeout, "SECONDS",
             "A process that is silent for this long ends the run")
      .range(1, 86400);
  command.choice(
      "--gradient-dtype", &flags.gradient_dtype, {"f32", "bf16"},
      "GPU: type of gradients on their way between processes, where they are added in f32");
  command
      .value("--max-restarts", &flags.max_restarts, "N",
             "With --gpus or --ranks: resume this many times when a process is lost")
      .range(0, 1e6)
      .not_in_files();
}

void add_model_flags(Command& command, ModelFlags& flags) {
  command.group("Model (default: the preset's)");
  command.value("--preset", &flags.preset, "NAME",
                fmt::format("{} (default: {}); larger ones bring the steps and the batch of "
                            "their recipe",
                            fmt::join(preset_names(), ", "), kDefaultPreset));
  command.value("--width", &flags.width, "D", "Width of the residual stream");
  command.value("--ffn", &flags.ffn, "F", "Hidden neurons of a feed-forward layer");
  command.value("--layers", &flags.layers, "L", "Layers");
  command.value("--heads", &flags.heads, "H", "Attention heads");
  command.value("--kv-heads", &flags.kv_heads, "N", "Key/value heads (default: as --heads)");
  command.value("--head-dim", &flags.head_dim, "N", "Size of a head (default: width / heads)");
  command.value("--context", &flags.context, "T", "Longest sequence the model is for, in tokens");
  command.value("--vocab-size", &flags.vocab_size, "V",
                "Vocabulary, also of a trained tokenizer (default with --tokenizer: its own)");
  command.flag("--gated", "--no-gated", &flags.gated,
               "Feed-forward layers with a gate, or without");
  command.flag("--tied", "--untied", &flags.tied,
               "One matrix for embedding and output head, or two");
  command.value(
      "--activation", &flags.activation, "NAME",
      "relu (default), relu2, silu, gelu, gelu_pytorch_tanh, quick_gelu; only relu and relu2 "
      "are sparse");
  command.value("--rope-theta", &flags.rope_theta, "X", "Base of the rotary embedding");
  command.value("--norm-eps", &flags.norm_eps, "X", "Epsilon of RMSNorm");
  command.value("--init-std", &flags.init_std, "X", "Standard deviation of initial weights");
}

void add_optimizer_flags(Command& command, TrainFlags& flags) {
  TrainOptions& train = flags.train;
  command.group("Length and batch");
  command.value("--steps", &flags.steps, "N",
                fmt::format("Optimizer steps (default: {})", train.steps));
  command.value("--tokens", &flags.tokens, "N", "Tokens to train on, instead of --steps");
  command.value("--sequence-length", &train.sequence_length, "T",
                "Tokens of a sequence; 0: the context");
  command.flag(
      "--document-mask", &train.document_mask,
      "Tokens attend only to tokens of their own document, where several share a sequence");
  command.value("--micro-batch", &train.micro_batch, "N", "Sequences in memory at a time");
  command.value(
      "--batch-tokens", &flags.batch_tokens, "N",
      "Tokens of an optimizer step, gathered over micro-batches (default: one per process)");
  command.value(
      "--recompute", &flags.recompute, "auto|none|norms[:N]|inputs[:N]|qkv[:N]",
      "GPU: what backward makes again to save memory: the blocks' normalised inputs (norms), the "
      "FFN's too (inputs), queries, keys and values too (qkv), the last named for N layers only; "
      "or the least of these that fits; the results are the same");
  command.group("Optimizer (AdamW)");
  command.value("--lr", &train.learning_rate, "X", "Peak learning rate");
  command.value("--min-lr-ratio", &train.min_lr_ratio, "X",
                "Share of the peak at which the cosine ends");
  command.value("--warmup-steps", &train.warmup_steps, "N",
                "Linear warm-up; -1: 600, or a tenth of a shorter run");
  command.value("--beta1", &train.beta1, "X", "Decay of the first moment");
  command.value("--beta2", &train.beta2, "X", "Decay of the second moment");
  command.value("--eps", &train.eps, "X", "Added to the denominator");
  command.value("--weight-decay", &train.weight_decay, "X",
                "Weight decay of matrices; norms have none");
  command.choice("--moment-dtype", &flags.moment_dtype, {"f32", "bf16"},
                 "GPU: type of the moments in memory");
  command.value("--clip", &train.clip_norm, "X", "Largest gradient norm; 0: no clipping");
}

void add_sparsify_flags(Command& command, TrainFlags& flags) {
  TrainOptions& train = flags.train;
  command.group("Sparsifying a model with another activation (--from)");
  command.flag("--relufy", &flags.relufy, "Replace the activation by ReLU and train on");
  command.value("--relufy-steps", &train.relufy_steps, "N",
                "Steps over which ReLU takes over; 0: at once");
  command.value("--distill", &train.distill, "SHARE",
                "Share of the loss that is the KL divergence from the original model; 0: none");
  command.value("--tasks", &flags.tasks.tasks, "NAMES",
                "With --relufy: multiple-choice tasks, with commas between them, that both models "
                "are put to at the end ('twell eval --help' has the names)");
  command.value("--task-data", &flags.tasks.data, "DIR",
                "Folder with the tasks' data sets as JSON lines or Parquet");
  command.value("--task-limit", &flags.tasks.limit, "N", "Only the first items of each; 0: all");
}

void add_sparsity_flags(Command& command, TrainFlags& flags) {
  TrainOptions& train = flags.train;
  command.group("Sparsity");
  command.value("--l1", &train.l1_coeff, "X", "L1 coefficient on hidden activations; 0: dense");
  command.choice("--l1-reduction", &flags.l1_reduction, {"sum", "mean"},
                 "Over the neurons of a layer: sum, or mean (the sum divided by F)");
  command.value("--l1-zero-steps", &train.l1_zero_steps, "N", "Steps before L1 sets in");
  command.value("--l1-ramp-steps", &train.l1_ramp_steps, "N",
                "Steps after those in which it grows to --l1");
  command.flag("--reinit-dead", &train.reinit_dead,
               "After every step, move neurons that no token activated towards random weights");
  command.value("--reinit-strength", &train.reinit_strength, "X",
                "Share of a dead neuron's weights that --reinit-dead replaces by random ones");
  command.value("--reinit-std", &train.reinit_std, "X",
                "Standard deviation of the random weights of --reinit-dead");
  command.choice("--ffn-policy", &flags.ffn_policy, {"auto", "dense", "hybrid"},
                 "Execution of the feed-forward layers; auto: per layer, by measured activity");
}

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
void override_with(const std::optional<T>& flag, T& value) {
  if (flag) value = *flag;
}

}  // namespace

bool ModelFlags::any() const {
  return preset || width || ffn || layers || heads || kv_heads || head_dim || context ||
         vocab_size || gated || tied || rope_theta || norm_eps || init_std || activation;
}

void add_train_flags(Command& command, TrainFlags& flags) {
  add_run_flags(command, flags);
  add_rank_flags(command, flags);
  add_source_options(command, flags.data);
  add_tokenizer_options(command, flags.data);
  command.value("--shards", &flags.shards, "DIR",
                "Folder of shards to use, or to write --data to (default: OUT/shards); from 'twell "
                "tokenize'");
  add_model_flags(command, flags.model);
  add_optimizer_flags(command, flags);
  add_sparsity_flags(command, flags);
  add_sparsify_flags(command, flags);
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
  try {
    config.validate();
  } catch (const InputError& error) {
    throw InputError(in_words_of_flags(error.what()));
  }
  return config;
}

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
  options.save_dtype = parse_dtype(flags.save_dtype);
  options.moment_dtype = parse_dtype(flags.moment_dtype);
  options.gradient_dtype = parse_dtype(flags.gradient_dtype);
  options.recompute = parse_recompute(flags.recompute);
  options.seed = common.seed;
  return options;
}

}  // namespace twell::cli
