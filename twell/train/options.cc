// SPDX-License-Identifier: Apache-2.0
#include "twell/train/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <numbers>
#include <type_traits>

#include "twell/base/error.h"
#include "twell/train/option_table.h"

namespace twell {
namespace {

// Larger than any run needs; small enough that the product of two such numbers fits into 64 bits.
constexpr int64_t kMaxSteps = 1'000'000'000;
constexpr int64_t kMaxBatchTokens = int64_t{1} << 32;

constexpr int64_t kRecipeBatchTokens = 1'048'576;  // 512 sequences of 2,048 tokens
constexpr int64_t kRecipeWarmupSteps = 600;

// The comparisons are false for NaN.
template <typename Number>
void require_between(const char* name, Number value, std::type_identity_t<Number> low,
                     std::type_identity_t<Number> high) {
  TWELL_REQUIRE(value >= low && value <= high, "{} must be between {} and {}, got {}", name, low,
                high, value);
}

int64_t decay_steps(const TrainOptions& options) {
  return std::llround(options.decay_fraction * static_cast<double>(options.steps));
}

void resolve_batch(TrainOptions& options, const ModelConfig& config) {
  if (options.sequence_length == 0) options.sequence_length = config.context;
  TWELL_REQUIRE(options.sequence_length >= 1 && options.sequence_length <= config.context,
                "sequence length {} does not fit the model's context of {} tokens",
                options.sequence_length, config.context);
  const int64_t micro_tokens = options.micro_batch_tokens();
  require_between("ranks", options.ranks, 1, 65536);
  if (options.batch_tokens == 0) options.batch_tokens = micro_tokens * options.ranks;
  require_between("batch tokens", options.batch_tokens, 1, kMaxBatchTokens);
  TWELL_REQUIRE(options.batch_tokens % micro_tokens == 0,
                "batch tokens {} is not a multiple of a micro-batch: {} sequences of {} tokens "
                "make {}",
                options.batch_tokens, options.micro_batch, options.sequence_length, micro_tokens);
  TWELL_REQUIRE(options.micro_batches() >= options.ranks,
                "batch tokens {} make {} micro-batches of {} x {}, too few for {} ranks; take "
                "smaller micro-batches or more batch tokens",
                options.batch_tokens, options.micro_batches(), options.micro_batch,
                options.sequence_length, options.ranks);
}

void resolve_length(TrainOptions& options) {
  require_between("tokens", options.tokens, 0, std::numeric_limits<int64_t>::max() / 2);
  if (options.tokens > 0) {
    options.steps = (options.tokens + options.batch_tokens - 1) / options.batch_tokens;
  }
  require_between("steps", options.steps, 1, kMaxSteps);
  options.tokens = options.steps * options.batch_tokens;
  if (options.warmup_steps == -1) {
    options.warmup_steps = std::min(kRecipeWarmupSteps, options.steps / 10);
  }
  TWELL_REQUIRE(options.warmup_steps >= 0 && options.warmup_steps < options.steps,
                "warm-up of {} steps does not fit a run of {} steps", options.warmup_steps,
                options.steps);
}

// The options whose ranges depend on others; the table has those of single ones.
void check_schedules(const TrainOptions& options) {
  TWELL_REQUIRE(options.schedule == Schedule::kCosine ||
                    options.warmup_steps + decay_steps(options) <= options.steps,
                "a warm-up of {} steps and a decay of {} do not fit a run of {} steps",
                options.warmup_steps, decay_steps(options), options.steps);
  TWELL_REQUIRE(options.relufy_steps < options.steps,
                "a blend of {} steps does not fit a run of {} steps", options.relufy_steps,
                options.steps);
}

// Refuses options that others turn off, which would have no effect.
void check_used(const TrainOptions& options) {
  const TrainOptions defaults;
  TWELL_REQUIRE(
      options.schedule == Schedule::kWsd || options.decay_fraction == defaults.decay_fraction,
      "--decay-fraction {} goes with --schedule wsd", options.decay_fraction);
  TWELL_REQUIRE(options.reinit_dead || options.reinit_strength == defaults.reinit_strength,
                "--reinit-strength {} goes with --reinit-dead", options.reinit_strength);
  TWELL_REQUIRE(options.reinit_dead || options.reinit_std == defaults.reinit_std,
                "--reinit-std {} goes with --reinit-dead", options.reinit_std);
  TWELL_REQUIRE(options.sample_every > 0 || options.sample_prompts.empty(),
                "--sample-prompt goes with --sample-every");
  TWELL_REQUIRE(options.sample_every > 0 || options.sample_tokens == defaults.sample_tokens,
                "--sample-tokens {} goes with --sample-every", options.sample_tokens);
}

void resolve_optimizer(TrainOptions& options) {
  constexpr double kMatrixRatio = 4.0;
  if (options.optimizer == OptimizerKind::kAdamW) {
    TWELL_REQUIRE(options.matrix_learning_rate == 0.0,
                  "--matrix-lr {} goes with --optimizer muon; AdamW takes --lr for all parameters",
                  options.matrix_learning_rate);
    TWELL_REQUIRE(options.momentum == TrainOptions().momentum,
                  "--momentum {} goes with --optimizer muon; AdamW takes --beta1",
                  options.momentum);
    return;
  }
  TWELL_REQUIRE(options.moment_dtype == DType::kF32,
                "--optimizer muon keeps its momentum in f32; leave --moment-dtype out");
  if (options.matrix_learning_rate == 0.0) {
    options.matrix_learning_rate = kMatrixRatio * options.learning_rate;
  }
}

}  // namespace

std::string_view l1_reduction_name(L1Reduction reduction) {
  return reduction == L1Reduction::kSum ? "sum" : "mean";
}

L1Reduction parse_l1_reduction(std::string_view name) {
  if (name == "sum") return L1Reduction::kSum;
  if (name == "mean") return L1Reduction::kMean;
  throw InputError(fmt::format("unknown L1 reduction '{}'; use sum or mean", name));
}

std::string_view schedule_name(Schedule schedule) {
  return schedule == Schedule::kCosine ? "cosine" : "wsd";
}

Schedule parse_schedule(std::string_view name) {
  if (name == "cosine") return Schedule::kCosine;
  if (name == "wsd") return Schedule::kWsd;
  throw InputError(fmt::format("unknown schedule '{}'; use cosine or wsd", name));
}

std::string_view optimizer_name(OptimizerKind optimizer) {
  return optimizer == OptimizerKind::kAdamW ? "adamw" : "muon";
}

OptimizerKind parse_optimizer(std::string_view name) {
  if (name == "adamw") return OptimizerKind::kAdamW;
  if (name == "muon") return OptimizerKind::kMuon;
  throw InputError(fmt::format("unknown optimizer '{}'; use adamw or muon", name));
}

std::optional<Recompute> parse_recompute(std::string_view name) {
  constexpr std::pair<std::string_view, RecomputeLevel> kLevels[] = {
      {"norms", RecomputeLevel::kNorms},
      {"inputs", RecomputeLevel::kInputs},
      {"qkv", RecomputeLevel::kQkv}};
  if (name == "auto") return std::nullopt;
  if (name == "none") return Recompute{};
  const size_t colon = name.find(':');
  for (const auto& [known, level] : kLevels) {
    if (name.substr(0, colon) != known) continue;
    Recompute recompute{level};
    if (colon == std::string_view::npos) return recompute;
    const std::string_view count = name.substr(colon + 1);
    const char* const end = count.data() + count.size();
    const auto [stop, fault] = std::from_chars(count.data(), end, recompute.layers);
    if (fault == std::errc() && stop == end && recompute.layers > 0) return recompute;
  }
  throw InputError(fmt::format(
      "unknown recomputation '{}'; use auto, none, norms, inputs or qkv, the last three "
      "also for the first N layers, as in qkv:8",
      name));
}

TrainOptions preset_train_options(std::string_view preset) {
  TrainOptions options;
  const ModelConfig config = preset_config(preset);
  if (preset == "tiny") return options;
  // 10,000 steps for the 8-layer model, and 10,000 more for every 10 additional layers.
  options.steps = 10'000 * (1 + (config.layers - 8) / 10);
  options.batch_tokens = kRecipeBatchTokens;
  return options;
}

TrainOptions resolve_options(TrainOptions options, const ModelConfig& config) {
  check_ranges(options);
  check_used(options);
  if (options.sample_every > 0 && options.sample_prompts.empty()) options.sample_prompts = {""};
  resolve_batch(options, config);
  resolve_length(options);
  check_schedules(options);
  resolve_optimizer(options);
  return options;
}

std::string trajectory_text(const TrainOptions& options) {
  nlohmann::json json = {
      {"sequence-length", options.sequence_length},
      {"micro-batch", options.micro_batch},
      {"batch-tokens", options.batch_tokens},
      {"lr", options.learning_rate},
      {"min-lr-ratio", options.min_lr_ratio},
      {"warmup-steps", options.warmup_steps},
      {"beta1", options.beta1},
      {"beta2", options.beta2},
      {"eps", options.eps},
      {"weight-decay", options.weight_decay},
      {"clip", options.clip_norm},
      {"l1", options.l1_coeff},
      {"l1-reduction", l1_reduction_name(options.l1_reduction)},
      {"l1-zero-steps", options.l1_zero_steps},
      {"l1-ramp-steps", options.l1_ramp_steps},
      {"reinit-dead", options.reinit_dead},
      {"reinit-strength", options.reinit_strength},
      {"reinit-std", options.reinit_std},
      {"ffn-policy", static_cast<int>(options.ffn_policy)},
      {"seed", options.seed},
  };
  // Omitted at their defaults, so that runs saved before these options existed can be resumed.
  if (options.relufy_from != Activation::kRelu) {
    json["relufy-from"] = activation_name(options.relufy_from);
    json["relufy-steps"] = options.relufy_steps;
  }
  if (options.schedule != Schedule::kCosine) {
    json["schedule"] = schedule_name(options.schedule);
    json["decay-fraction"] = options.decay_fraction;
  }
  if (options.optimizer != OptimizerKind::kAdamW) {
    json["optimizer"] = optimizer_name(options.optimizer);
    json["matrix-lr"] = options.matrix_learning_rate;
    json["momentum"] = options.momentum;
  }
  if (options.document_mask) json["document-mask"] = true;
  if (options.distill > 0.0) json["distill"] = options.distill;
  if (options.gradient_dtype != DType::kF32) {
    json["gradient-dtype"] = dtype_name(options.gradient_dtype);
  }
  if (options.compute != MatmulCompute::kF32) json["compute"] = "bf16";
  if (options.moment_dtype != DType::kF32) json["moment-dtype"] = dtype_name(options.moment_dtype);
  return json.dump();
}

double learning_rate_at(const TrainOptions& options, int64_t step) {
  if (step < options.warmup_steps) {
    return options.learning_rate * static_cast<double>(step + 1) /
           static_cast<double>(options.warmup_steps);
  }
  double share = 1.0;  // of the way from the final rate to the peak
  if (options.schedule == Schedule::kWsd) {
    const int64_t decay = decay_steps(options);
    if (step > options.steps - decay) {
      share = static_cast<double>(options.steps - step) / static_cast<double>(decay);
    }
  } else {
    const double progress = static_cast<double>(step - options.warmup_steps) /
                            static_cast<double>(options.steps - options.warmup_steps);
    share = 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  }
  return options.learning_rate * (options.min_lr_ratio + (1.0 - options.min_lr_ratio) * share);
}

double matrix_learning_rate_at(const TrainOptions& options, int64_t step) {
  return learning_rate_at(options, step) * (options.matrix_learning_rate / options.learning_rate);
}

double l1_coeff_at(const TrainOptions& options, int64_t step, int64_t ffn) {
  const double full = options.l1_reduction == L1Reduction::kSum
                          ? options.l1_coeff
                          : options.l1_coeff / static_cast<double>(ffn);
  if (step < options.l1_zero_steps) return 0.0;
  const int64_t ramped = step - options.l1_zero_steps + 1;
  if (ramped >= options.l1_ramp_steps) return full;
  return full * static_cast<double>(ramped) / static_cast<double>(options.l1_ramp_steps);
}

double relu_share_at(const TrainOptions& options, int64_t step) {
  if (options.relufy_from == Activation::kRelu || step >= options.relufy_steps) return 1.0;
  return static_cast<double>(step + 1) / static_cast<double>(options.relufy_steps + 1);
}

}  // namespace twell
