// SPDX-License-Identifier: Apache-2.0
#include "twell/train/option_table.h"

#include <algorithm>
#include <string_view>

namespace twell {
namespace {

constexpr double kMostSteps = 1e9;  // more than any run has

std::vector<std::string> words_in(std::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const size_t end = std::min(text.find('|'), text.size());
    parts.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

#define TWELL_MEMBER(name) [](RunSettings& s) -> OptionTarget { return &s.name; }

constexpr OptionRow flag_row(const char* name, OptionVariable member, const char* help) {
  return {.name = name, .help = help, .member = member};
}
constexpr OptionRow choice_row(const char* name, OptionVariable member, const char* values,
                               const char* help) {
  return {.name = name, .values = values, .help = help, .member = member};
}
constexpr OptionRow value_row(const char* name, OptionVariable member, const char* type,
                              const char* help, OptionRange range = {},
                              const char* proposals = "") {
  return {name, range, type, "", proposals, help, member};
}

constexpr OptionRow kRun[] = {
    value_row("from", TWELL_MEMBER(from), "DIR",
              "Start from the weights of this checkpoint, which decides the model"),
    value_row("chat-data", TWELL_MEMBER(chat_data), "FILE",
              "Train --from on conversations: JSON lines with messages, or prompt and completion; "
              "the loss is on answers alone"),
    value_row("chat-template", TWELL_MEMBER(chat_template), "FILE",
              "Chat template (Jinja) for --chat-data in place of the checkpoint's"),
    value_row("save-every", TWELL_MEMBER(train.save_every), "STEPS",
              "Steps between checkpoints; 0: at the end only", {0, kMostSteps}),
    value_row("keep-last", TWELL_MEMBER(train.keep_last), "N", "Checkpoints to keep", {1, 1e6}),
    choice_row("save-dtype", TWELL_MEMBER(save_dtype), "f32|bf16|f16",
               "Type of the weights in model.safetensors"),
    value_row("validate-every", TWELL_MEMBER(train.validate_every), "STEPS",
              "Steps between validations; 0: never", {0, kMostSteps}),
    value_row("validation-sequences", TWELL_MEMBER(train.validation_sequences), "N",
              "Sequences of a validation, at most; spread evenly over the split", {1, kMostSteps}),
    value_row("sample-every", TWELL_MEMBER(train.sample_every), "STEPS",
              "Steps between texts that the model writes, for --out's metrics.jsonl; 0: never",
              {0, kMostSteps}),
    value_row("sample-prompt", TWELL_MEMBER(train.sample_prompts), "TEXT",
              "Beginning of such a text; repeatable (default: one from its beginning)"),
    value_row("sample-tokens", TWELL_MEMBER(train.sample_tokens), "N",
              "Tokens of such a text, at most", {1, 1e6}),
    flag_row("tensorboard", TWELL_MEMBER(tensorboard),
             "Also write TensorBoard events to OUT/tensorboard"),
    choice_row(
        "gradient-dtype", TWELL_MEMBER(gradient_dtype), "f32|bf16",
        "GPU: type of gradients on their way between processes, where they are added in f32"),
    choice_row(
        "compute", TWELL_MEMBER(compute), "f32|bf16",
        "CPU: type of the factors in products, which are added in f32; bf16 needs AVX512_BF16 "
        "or AMX"),
};

// A model's own checks (ModelConfig::validate) say what its sizes may be.
constexpr OptionRow kModel[] = {
    value_row(
        "preset", TWELL_MEMBER(preset), "NAME",
        "tiny (default), 0.5b, 1b, 1.5b, 2b; larger ones bring the steps and the batch of their "
        "recipe",
        {}, "tiny|0.5b|1b|1.5b|2b"),
    value_row("width", TWELL_MEMBER(width), "D", "Width of the residual stream"),
    value_row("ffn", TWELL_MEMBER(ffn), "F", "Hidden neurons of a feed-forward layer"),
    value_row("layers", TWELL_MEMBER(layers), "L", "Layers"),
    value_row("heads", TWELL_MEMBER(heads), "H", "Attention heads"),
    value_row("kv-heads", TWELL_MEMBER(kv_heads), "N", "Key/value heads (default: as --heads)"),
    value_row("head-dim", TWELL_MEMBER(head_dim), "N", "Size of a head (default: width / heads)"),
    value_row("context", TWELL_MEMBER(context), "T",
              "Longest sequence the model is for, in tokens"),
    value_row("vocab-size", TWELL_MEMBER(vocab_size), "V",
              "Vocabulary, also of a trained tokenizer (default with --tokenizer: its own)"),
    flag_row("gated/no-gated", TWELL_MEMBER(gated), "Feed-forward layers with a gate, or without"),
    flag_row("tied/untied", TWELL_MEMBER(tied), "One matrix for embedding and output head, or two"),
    value_row(
        "activation", TWELL_MEMBER(activation), "NAME",
        "relu (default), relu2, silu, gelu, gelu_pytorch_tanh, quick_gelu; only relu and relu2 "
        "are sparse",
        {}, "relu|relu2|silu|gelu|gelu_pytorch_tanh|quick_gelu"),
    value_row("rope-theta", TWELL_MEMBER(rope_theta), "X", "Base of the rotary embedding"),
    value_row("norm-eps", TWELL_MEMBER(norm_eps), "X", "Epsilon of RMSNorm"),
    value_row("init-std", TWELL_MEMBER(init_std), "X", "Standard deviation of initial weights"),
};

constexpr OptionRow kLength[] = {
    value_row("steps", TWELL_MEMBER(steps), "N", "Optimizer steps (default: 1000, or the preset's)",
              {1, kMostSteps}),
    value_row("tokens", TWELL_MEMBER(tokens), "N", "Tokens to train on, instead of --steps",
              {1, 4.6e18}),
    value_row("sequence-length", TWELL_MEMBER(train.sequence_length), "T",
              "Tokens of a sequence; 0: the context", {.lowest = 0}),
    flag_row("document-mask", TWELL_MEMBER(train.document_mask),
             "Tokens attend only to tokens of their own document, where several share a sequence"),
    value_row("micro-batch", TWELL_MEMBER(train.micro_batch), "N", "Sequences in memory at a time",
              {1, 65536}),
    value_row("batch-tokens", TWELL_MEMBER(batch_tokens), "N",
              "Tokens of an optimizer step, gathered over micro-batches (default: one per process)",
              {1, 4294967296.0}),
    value_row(
        "recompute", TWELL_MEMBER(recompute), "auto|none|norms[:N]|inputs[:N]|qkv[:N]",
        "GPU: what backward makes again to save memory: the blocks' normalised inputs (norms), "
        "the FFN's too (inputs), queries, keys and values too (qkv), the last named for N "
        "layers only; or the least of these that fits; the results are the same",
        {}, "auto|none|norms|inputs|qkv"),
};

constexpr OptionRow kOptimizer[] = {
    choice_row("optimizer", TWELL_MEMBER(optimizer), "adamw|muon",
               "What updates the matrices of layers; all other parameters take AdamW"),
    value_row("lr", TWELL_MEMBER(train.learning_rate), "X", "Peak learning rate",
              {.lowest = 0, .highest = 10, .above = true}),
    value_row("matrix-lr", TWELL_MEMBER(train.matrix_learning_rate), "X",
              "Muon: peak learning rate of the matrices of layers; 0: four times --lr", {0, 10}),
    value_row("momentum", TWELL_MEMBER(train.momentum), "X", "Muon: decay of the momentum",
              {.lowest = 0, .highest = 1, .below = true}),
    choice_row(
        "schedule", TWELL_MEMBER(schedule), "cosine|wsd",
        "After the warm-up: cosine down to the end, or warm-up, stable, decay (wsd): the peak, "
        "then a line down over the last part"),
    value_row("decay-fraction", TWELL_MEMBER(train.decay_fraction), "X",
              "Share of the steps in which wsd decays", {0, 1}),
    value_row("min-lr-ratio", TWELL_MEMBER(train.min_lr_ratio), "X",
              "Share of the peak at which the schedule ends", {0, 1}),
    value_row("warmup-steps", TWELL_MEMBER(train.warmup_steps), "N",
              "Linear warm-up; -1: 600, or a tenth of a shorter run", {-1, kMostSteps}),
    value_row("beta1", TWELL_MEMBER(train.beta1), "X", "Decay of the first moment",
              {.lowest = 0, .highest = 1, .below = true}),
    value_row("beta2", TWELL_MEMBER(train.beta2), "X", "Decay of the second moment",
              {.lowest = 0, .highest = 1, .below = true}),
    value_row("eps", TWELL_MEMBER(train.eps), "X", "Added to the denominator", {1e-30, 1}),
    value_row("weight-decay", TWELL_MEMBER(train.weight_decay), "X",
              "Weight decay of matrices; norms have none", {0, 100}),
    choice_row("moment-dtype", TWELL_MEMBER(moment_dtype), "f32|bf16",
               "Type of the moments; bf16, rounded stochastically, halves their memory on a GPU"),
    value_row("clip", TWELL_MEMBER(train.clip_norm), "X", "Largest gradient norm; 0: no clipping",
              {0, 1e9}),
};

constexpr OptionRow kSparsity[] = {
    value_row("l1", TWELL_MEMBER(l1), "X",
              "L1 coefficient on hidden activations (default: 2e-05); 0: dense", {0, 1e6}),
    choice_row("l1-reduction", TWELL_MEMBER(l1_reduction), "sum|mean",
               "Over the neurons of a layer: sum, or mean (the sum divided by F)"),
    value_row("l1-zero-steps", TWELL_MEMBER(train.l1_zero_steps), "N", "Steps before L1 sets in",
              {0, kMostSteps}),
    value_row("l1-ramp-steps", TWELL_MEMBER(train.l1_ramp_steps), "N",
              "Steps after those in which it grows to --l1", {0, kMostSteps}),
    flag_row("reinit-dead", TWELL_MEMBER(train.reinit_dead),
             "After every step, move neurons that no token activated towards random weights"),
    value_row("reinit-strength", TWELL_MEMBER(train.reinit_strength), "X",
              "Share of a dead neuron's weights that --reinit-dead replaces by random ones",
              {0, 1}),
    value_row("reinit-std", TWELL_MEMBER(train.reinit_std), "X",
              "Standard deviation of the random weights of --reinit-dead", {0, 100}),
    choice_row("ffn-policy", TWELL_MEMBER(ffn_policy), "auto|dense|hybrid",
               "Execution of the feed-forward layers; auto: per layer, by measured activity"),
};

constexpr OptionRow kSparsifying[] = {
    flag_row("relufy", TWELL_MEMBER(relufy), "Replace the activation by ReLU and train on"),
    value_row("relufy-steps", TWELL_MEMBER(train.relufy_steps), "N",
              "Steps over which ReLU takes over; 0: at once", {0, kMostSteps}),
    value_row("distill", TWELL_MEMBER(train.distill), "SHARE",
              "Share of the loss that is the KL divergence from the original model; 0: none",
              {0, 1}),
};

constexpr OptionRow kMachine[] = {
    value_row("seed", TWELL_MEMBER(train.seed), "N",
              "Seed of every random choice; same seed, same result"),
};

#undef TWELL_MEMBER

constexpr OptionGroup kGroups[] = {
    {"Run", kRun},
    {"Model (default: the preset's)", kModel},
    {"Length and batch", kLength},
    {"Optimizer", kOptimizer},
    {"Sparsity", kSparsity},
    {"Sparsifying a model with another activation (--from)", kSparsifying},
    {"Machine", kMachine},
};

}  // namespace

bool RunSettings::sets_model() const {
  return preset || width || ffn || layers || heads || kv_heads || head_dim || context ||
         vocab_size || gated || tied || rope_theta || norm_eps || init_std || activation;
}

std::span<const OptionGroup> option_table() { return kGroups; }

Option make_option(const OptionRow& row, const char* heading, RunSettings& settings) {
  const std::string_view name = row.name;
  const size_t slash = name.find('/');
  const std::string negated =
      slash == std::string_view::npos ? "" : "--" + std::string(name.substr(slash + 1));
  const std::string_view values = row.values;
  Option option("--" + std::string(name.substr(0, slash)), negated, row.member(settings),
                std::string(values.empty() ? row.type : values), row.help, heading);
  option.range(row.range);
  if (!values.empty()) option.choices(words_in(values));
  if (*row.proposals != '\0') option.suggests(words_in(row.proposals));
  return option;
}

void check_ranges(const TrainOptions& options) {
  RunSettings settings;
  settings.train = options;
  settings.l1 = options.l1_coeff;
  for (const OptionGroup& group : option_table()) {
    for (const OptionRow& row : group.rows) {
      make_option(row, group.heading, settings).check_variable();
    }
  }
}

}  // namespace twell
