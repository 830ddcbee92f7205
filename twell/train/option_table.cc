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

constexpr OptionRow kRun[] = {
    {.name = "from",
     .type = "DIR",
     .help = "Start from the weights of this checkpoint, which decides the model",
     .member = TWELL_MEMBER(from)},
    {.name = "chat-data",
     .type = "FILE",
     .help = "Train --from on conversations: JSON lines with messages, or prompt and completion; "
             "the loss is on answers alone",
     .member = TWELL_MEMBER(chat_data)},
    {.name = "chat-template",
     .type = "FILE",
     .help = "Chat template (Jinja) for --chat-data in place of the checkpoint's",
     .member = TWELL_MEMBER(chat_template)},
    {.name = "save-every",
     .range = {0, kMostSteps},
     .type = "STEPS",
     .help = "Steps between checkpoints; 0: at the end only",
     .member = TWELL_MEMBER(train.save_every)},
    {.name = "keep-last",
     .range = {1, 1e6},
     .type = "N",
     .help = "Checkpoints to keep",
     .member = TWELL_MEMBER(train.keep_last)},
    {.name = "save-dtype",
     .values = "f32|bf16|f16",
     .help = "Type of the weights in model.safetensors",
     .member = TWELL_MEMBER(save_dtype)},
    {.name = "validate-every",
     .range = {0, kMostSteps},
     .type = "STEPS",
     .help = "Steps between validations; 0: never",
     .member = TWELL_MEMBER(train.validate_every)},
    {.name = "validation-sequences",
     .range = {1, kMostSteps},
     .type = "N",
     .help = "Sequences of a validation, at most; spread evenly over the split",
     .member = TWELL_MEMBER(train.validation_sequences)},
    {.name = "sample-every",
     .range = {0, kMostSteps},
     .type = "STEPS",
     .help = "Steps between texts that the model writes, for --out's metrics.jsonl; 0: never",
     .member = TWELL_MEMBER(train.sample_every)},
    {.name = "sample-prompt",
     .type = "TEXT",
     .help = "Beginning of such a text; repeatable (default: one from its beginning)",
     .member = TWELL_MEMBER(train.sample_prompts)},
    {.name = "sample-tokens",
     .range = {1, 1e6},
     .type = "N",
     .help = "Tokens of such a text, at most",
     .member = TWELL_MEMBER(train.sample_tokens)},
    {.name = "tensorboard",
     .help = "Also write TensorBoard events to OUT/tensorboard",
     .member = TWELL_MEMBER(tensorboard)},
    {.name = "gradient-dtype",
     .values = "f32|bf16",
     .help = "GPU: type of gradients on their way between processes, where they are added in f32",
     .member = TWELL_MEMBER(gradient_dtype)},
    {.name = "compute",
     .values = "f32|bf16",
     .help = "CPU: type of the factors in products, which are added in f32; bf16 needs AVX512_BF16 "
             "or AMX",
     .member = TWELL_MEMBER(compute)},
};

// A model's own checks (ModelConfig::validate) say what its sizes may be.
constexpr OptionRow kModel[] = {
    {.name = "preset",
     .type = "NAME",
     .proposals = "tiny|0.5b|1b|1.5b|2b",
     .help =
         "tiny (default), 0.5b, 1b, 1.5b, 2b; larger ones bring the steps and the batch of their "
         "recipe",
     .member = TWELL_MEMBER(preset)},
    {.name = "width",
     .type = "D",
     .help = "Width of the residual stream",
     .member = TWELL_MEMBER(width)},
    {.name = "ffn",
     .type = "F",
     .help = "Hidden neurons of a feed-forward layer",
     .member = TWELL_MEMBER(ffn)},
    {.name = "layers", .type = "L", .help = "Layers", .member = TWELL_MEMBER(layers)},
    {.name = "heads", .type = "H", .help = "Attention heads", .member = TWELL_MEMBER(heads)},
    {.name = "kv-heads",
     .type = "N",
     .help = "Key/value heads (default: as --heads)",
     .member = TWELL_MEMBER(kv_heads)},
    {.name = "head-dim",
     .type = "N",
     .help = "Size of a head (default: width / heads)",
     .member = TWELL_MEMBER(head_dim)},
    {.name = "context",
     .type = "T",
     .help = "Longest sequence the model is for, in tokens",
     .member = TWELL_MEMBER(context)},
    {.name = "vocab-size",
     .type = "V",
     .help = "Vocabulary, also of a trained tokenizer (default with --tokenizer: its own)",
     .member = TWELL_MEMBER(vocab_size)},
    {.name = "gated/no-gated",
     .help = "Feed-forward layers with a gate, or without",
     .member = TWELL_MEMBER(gated)},
    {.name = "tied/untied",
     .help = "One matrix for embedding and output head, or two",
     .member = TWELL_MEMBER(tied)},
    {.name = "activation",
     .type = "NAME",
     .proposals = "relu|relu2|silu|gelu|gelu_pytorch_tanh|quick_gelu",
     .help =
         "relu (default), relu2, silu, gelu, gelu_pytorch_tanh, quick_gelu; only relu and relu2 "
         "are sparse",
     .member = TWELL_MEMBER(activation)},
    {.name = "rope-theta",
     .type = "X",
     .help = "Base of the rotary embedding",
     .member = TWELL_MEMBER(rope_theta)},
    {.name = "norm-eps",
     .type = "X",
     .help = "Epsilon of RMSNorm",
     .member = TWELL_MEMBER(norm_eps)},
    {.name = "init-std",
     .type = "X",
     .help = "Standard deviation of initial weights",
     .member = TWELL_MEMBER(init_std)},
};

constexpr OptionRow kLength[] = {
    {.name = "steps",
     .range = {1, kMostSteps},
     .type = "N",
     .help = "Optimizer steps (default: 1000, or the preset's)",
     .member = TWELL_MEMBER(steps)},
    {.name = "tokens",
     .range = {1, 4.6e18},
     .type = "N",
     .help = "Tokens to train on, instead of --steps",
     .member = TWELL_MEMBER(tokens)},
    {.name = "sequence-length",
     .range = {.lowest = 0},
     .type = "T",
     .help = "Tokens of a sequence; 0: the context",
     .member = TWELL_MEMBER(train.sequence_length)},
    {.name = "document-mask",
     .help = "Tokens attend only to tokens of their own document, where several share a sequence",
     .member = TWELL_MEMBER(train.document_mask)},
    {.name = "micro-batch",
     .range = {1, 65536},
     .type = "N",
     .help = "Sequences in memory at a time",
     .member = TWELL_MEMBER(train.micro_batch)},
    {.name = "batch-tokens",
     .range = {1, 4294967296.0},
     .type = "N",
     .help = "Tokens of an optimizer step, gathered over micro-batches (default: one per process)",
     .member = TWELL_MEMBER(batch_tokens)},
    {.name = "recompute",
     .type = "auto|none|norms[:N]|inputs[:N]|qkv[:N]",
     .proposals = "auto|none|norms|inputs|qkv",
     .help =
         "GPU: what backward makes again to save memory: the blocks' normalised inputs (norms), "
         "the FFN's too (inputs), queries, keys and values too (qkv), the last named for N "
         "layers only; or the least of these that fits; the results are the same",
     .member = TWELL_MEMBER(recompute)},
};

constexpr OptionRow kOptimizer[] = {
    {.name = "optimizer",
     .values = "adamw|muon",
     .help = "What updates the matrices of layers; all other parameters take AdamW",
     .member = TWELL_MEMBER(optimizer)},
    {.name = "lr",
     .range = {.lowest = 0, .highest = 10, .above = true},
     .type = "X",
     .help = "Peak learning rate",
     .member = TWELL_MEMBER(train.learning_rate)},
    {.name = "matrix-lr",
     .range = {0, 10},
     .type = "X",
     .help = "Muon: peak learning rate of the matrices of layers; 0: four times --lr",
     .member = TWELL_MEMBER(train.matrix_learning_rate)},
    {.name = "momentum",
     .range = {.lowest = 0, .highest = 1, .below = true},
     .type = "X",
     .help = "Muon: decay of the momentum",
     .member = TWELL_MEMBER(train.momentum)},
    {.name = "schedule",
     .values = "cosine|wsd",
     .help =
         "After the warm-up: cosine down to the end, or warm-up, stable, decay (wsd): the peak, "
         "then a line down over the last part",
     .member = TWELL_MEMBER(schedule)},
    {.name = "decay-fraction",
     .range = {0, 1},
     .type = "X",
     .help = "Share of the steps in which wsd decays",
     .member = TWELL_MEMBER(train.decay_fraction)},
    {.name = "min-lr-ratio",
     .range = {0, 1},
     .type = "X",
     .help = "Share of the peak at which the schedule ends",
     .member = TWELL_MEMBER(train.min_lr_ratio)},
    {.name = "warmup-steps",
     .range = {-1, kMostSteps},
     .type = "N",
     .help = "Linear warm-up; -1: 600, or a tenth of a shorter run",
     .member = TWELL_MEMBER(train.warmup_steps)},
    {.name = "beta1",
     .range = {.lowest = 0, .highest = 1, .below = true},
     .type = "X",
     .help = "Decay of the first moment",
     .member = TWELL_MEMBER(train.beta1)},
    {.name = "beta2",
     .range = {.lowest = 0, .highest = 1, .below = true},
     .type = "X",
     .help = "Decay of the second moment",
     .member = TWELL_MEMBER(train.beta2)},
    {.name = "eps",
     .range = {1e-30, 1},
     .type = "X",
     .help = "Added to the denominator",
     .member = TWELL_MEMBER(train.eps)},
    {.name = "weight-decay",
     .range = {0, 100},
     .type = "X",
     .help = "Weight decay of matrices; norms have none",
     .member = TWELL_MEMBER(train.weight_decay)},
    {.name = "moment-dtype",
     .values = "f32|bf16",
     .help = "Type of the moments; bf16, rounded stochastically, halves their memory on a GPU",
     .member = TWELL_MEMBER(moment_dtype)},
    {.name = "clip",
     .range = {0, 1e9},
     .type = "X",
     .help = "Largest gradient norm; 0: no clipping",
     .member = TWELL_MEMBER(train.clip_norm)},
};

constexpr OptionRow kSparsity[] = {
    {.name = "l1",
     .range = {0, 1e6},
     .type = "X",
     .help = "L1 coefficient on hidden activations (default: 2e-05); 0: dense",
     .member = TWELL_MEMBER(l1)},
    {.name = "l1-reduction",
     .values = "sum|mean",
     .help = "Over the neurons of a layer: sum, or mean (the sum divided by F)",
     .member = TWELL_MEMBER(l1_reduction)},
    {.name = "l1-zero-steps",
     .range = {0, kMostSteps},
     .type = "N",
     .help = "Steps before L1 sets in",
     .member = TWELL_MEMBER(train.l1_zero_steps)},
    {.name = "l1-ramp-steps",
     .range = {0, kMostSteps},
     .type = "N",
     .help = "Steps after those in which it grows to --l1",
     .member = TWELL_MEMBER(train.l1_ramp_steps)},
    {.name = "reinit-dead",
     .help = "After every step, move neurons that no token activated towards random weights",
     .member = TWELL_MEMBER(train.reinit_dead)},
    {.name = "reinit-strength",
     .range = {0, 1},
     .type = "X",
     .help = "Share of a dead neuron's weights that --reinit-dead replaces by random ones",
     .member = TWELL_MEMBER(train.reinit_strength)},
    {.name = "reinit-std",
     .range = {0, 100},
     .type = "X",
     .help = "Standard deviation of the random weights of --reinit-dead",
     .member = TWELL_MEMBER(train.reinit_std)},
    {.name = "ffn-policy",
     .values = "auto|dense|hybrid",
     .help = "Execution of the feed-forward layers; auto: per layer, by measured activity",
     .member = TWELL_MEMBER(ffn_policy)},
};

constexpr OptionRow kSparsifying[] = {
    {.name = "relufy",
     .help = "Replace the activation by ReLU and train on",
     .member = TWELL_MEMBER(relufy)},
    {.name = "relufy-steps",
     .range = {0, kMostSteps},
     .type = "N",
     .help = "Steps over which ReLU takes over; 0: at once",
     .member = TWELL_MEMBER(train.relufy_steps)},
    {.name = "distill",
     .range = {0, 1},
     .type = "SHARE",
     .help = "Share of the loss that is the KL divergence from the original model; 0: none",
     .member = TWELL_MEMBER(train.distill)},
};

constexpr OptionRow kMachine[] = {
    {.name = "seed",
     .type = "N",
     .help = "Seed of every random choice; same seed, same result",
     .member = TWELL_MEMBER(train.seed)},
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
