// SPDX-License-Identifier: Apache-2.0
// Every hyper-parameter of a training run, and the schedules that follow from them. Defaults are
// the published recipe where it names a value; sizes left at 0 are derived by resolve_options.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "twell/base/dtype.h"
#include "twell/model/config.h"
#include "twell/model/recompute.h"
#include "twell/ops/ffn_train/ffn_train.h"

namespace twell {

// "none", "norms", "inputs" or "qkv", the last three also for the first layers only, as "qkv:8";
// "auto" gives no value. InputError for other names.
std::optional<Recompute> parse_recompute(std::string_view name);

// The L1 term of one layer and token: the sum over hidden units of |h|, or their mean (the sum
// divided by F).
enum class L1Reduction { kSum, kMean };
std::string_view l1_reduction_name(L1Reduction reduction);
L1Reduction parse_l1_reduction(std::string_view name);  // "sum", "mean"; InputError

struct TrainOptions {
  // Length of the run. With tokens > 0, steps = ceil(tokens / batch_tokens).
  int64_t steps = 1000;
  int64_t tokens = 0;

  int64_t sequence_length = 0;  // 0: the model's context
  int64_t micro_batch = 8;      // sequences in memory at a time
  int64_t batch_tokens = 0;     // of one optimizer step; 0: one micro-batch

  double learning_rate = 1e-3;
  double min_lr_ratio = 0.0;  // the cosine ends at this share of learning_rate
  int64_t warmup_steps = -1;  // -1: 600, or a tenth of a run shorter than 6,000 steps
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  // matrices only, never norms
  double clip_norm = 1.0;     // of the global gradient; 0: no clipping

  double l1_coeff = 2e-5;
  L1Reduction l1_reduction = L1Reduction::kSum;
  int64_t l1_zero_steps = 0;  // steps without L1, then
  int64_t l1_ramp_steps = 0;  // steps of linear growth to l1_coeff
  // Sparsifying replaces this activation of a model by ReLU, at once or over relufy_steps steps.
  // kRelu: nothing is replaced.
  Activation relufy_from = Activation::kRelu;
  int64_t relufy_steps = 0;
  double distill = 0.0;  // share of KL(teacher || model) in the loss; 0: no teacher
  // After every step, weights of neurons that none of its tokens activated become
  // (1 - strength) w + strength N(0, std^2).
  bool reinit_dead = false;
  double reinit_strength = 0.1;
  double reinit_std = 0.02;
  FfnTrainPolicy ffn_policy = FfnTrainPolicy::kAuto;

  DType moment_dtype = DType::kF32;  // of AdamW's moments in memory: f32, or on the GPU bf16
  // On the GPU; the CPU recomputes nothing. Without a value: the least that fits the memory.
  std::optional<Recompute> recompute;

  int64_t validate_every = 100;       // steps; 0: never
  int64_t validation_sequences = 32;  // at most
  int64_t save_every = 500;           // steps; 0: at the end only
  int64_t keep_last = 2;              // checkpoints
  DType save_dtype = DType::kF32;     // of model.safetensors
  uint64_t seed = 0;

  int64_t micro_batch_tokens() const { return micro_batch * sequence_length; }
  int64_t micro_batches() const { return batch_tokens / micro_batch_tokens(); }
  int64_t batch_sequences() const { return batch_tokens / sequence_length; }
};

// The recipe of a model preset: its steps and batch; InputError for an unknown name.
TrainOptions preset_train_options(std::string_view preset);

// Fills in derived values and checks every value against its range, the others and the model.
// InputError says which value is refused and why.
TrainOptions resolve_options(TrainOptions options, const ModelConfig& config);

// The resolved options that decide what the weights become, without the length of the run, as the
// text of a JSON object.
std::string trajectory_text(const TrainOptions& options);

// Values that change over a run, as functions of the step, which counts from 0.

// Linear warm-up to learning_rate over warmup_steps, then a cosine down to min_lr_ratio of it.
double learning_rate_at(const TrainOptions& options, int64_t step);

// The coefficient of (mean over layers, mean over tokens, sum over neurons of |h|): zero for
// l1_zero_steps, then linear growth over l1_ramp_steps; divided by `ffn` for the mean reduction.
double l1_coeff_at(const TrainOptions& options, int64_t step, int64_t ffn);

// Share of ReLU in the activation of a model that is being sparsified: it rises over relufy_steps
// in equal parts, and is 1 from then on.
double relu_share_at(const TrainOptions& options, int64_t step);

}  // namespace twell
