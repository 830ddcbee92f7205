// SPDX-License-Identifier: Apache-2.0
// All hyper-parameters of a training run, and the schedules derived from them. Defaults follow the
// published recipe where it gives a value; resolve_options derives sizes left at 0.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "twell/base/dtype.h"
#include "twell/model/config.h"
#include "twell/model/training.h"
#include "twell/ops/ffn_train/ffn_train.h"
#include "twell/ops/matmul/compute.h"

namespace twell {

// Parses "none", "norms", "inputs" or "qkv"; the last three can be limited to the first layers, as
// in "qkv:8". "auto" returns no value. InputError for other names.
std::optional<Recompute> parse_recompute(std::string_view name);

// The L1 term of one layer and token: the sum over hidden units of |h|, or their mean (the
// sum divided by F).
enum class L1Reduction { kSum, kMean };
std::string_view l1_reduction_name(L1Reduction reduction);
L1Reduction parse_l1_reduction(std::string_view name);  // "sum", "mean"; InputError

// What updates the matrices of layers: AdamW, as everything else, or Muon (muon.h).
enum class OptimizerKind { kAdamW, kMuon };
std::string_view optimizer_name(OptimizerKind optimizer);
OptimizerKind parse_optimizer(std::string_view name);  // "adamw", "muon"; InputError

// How the learning rate goes on after its warm-up: a cosine down to the end, or the peak and then a
// line down over the last decay_fraction of the steps (warm-up, stable, decay).
enum class Schedule { kCosine, kWsd };
std::string_view schedule_name(Schedule schedule);
Schedule parse_schedule(std::string_view name);  // "cosine", "wsd"; InputError

struct TrainOptions {
  // Length of the run. With tokens > 0, steps = ceil(tokens / batch_tokens).
  int64_t steps = 1000;
  int64_t tokens = 0;

  int64_t sequence_length = 0;  // tokens; 0: the model's context
  int64_t micro_batch = 8;      // sequences per forward and backward pass
  int64_t batch_tokens = 0;     // tokens per optimizer step; 0: one micro-batch per rank
  // Tokens attend only to tokens of their own document. An end-of-document token belongs to the
  // document that it ends; positions begin at 0 in each, and every token stays a target.
  bool document_mask = false;
  // Processes that share the micro-batches of each step: rank r takes r, r + ranks, ...
  int64_t ranks = 1;

  OptimizerKind optimizer = OptimizerKind::kAdamW;
  double learning_rate = 1e-3;
  // Muon takes this peak for the matrices of layers, with learning_rate's schedule; 0: four times
  // learning_rate.
  double matrix_learning_rate = 0.0;
  double momentum = 0.95;  // Muon's
  Schedule schedule = Schedule::kCosine;
  double decay_fraction = 0.2;  // of the steps; kWsd alone
  double min_lr_ratio = 0.0;    // final learning rate / learning_rate
  int64_t warmup_steps = -1;    // -1: 600, or a tenth of a run shorter than 6,000 steps
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  // matrices only, never norms
  double clip_norm = 1.0;     // of the global gradient; 0: no clipping

  double l1_coeff = 2e-5;
  L1Reduction l1_reduction = L1Reduction::kSum;
  int64_t l1_zero_steps = 0;  // initial steps without L1
  int64_t l1_ramp_steps = 0;  // steps of linear growth to l1_coeff after these
  // Sparsifying replaces this activation by ReLU, at once or gradually over relufy_steps steps.
  // kRelu: nothing is replaced.
  Activation relufy_from = Activation::kRelu;
  int64_t relufy_steps = 0;
  double distill = 0.0;  // share of KL(teacher || model) in the loss; 0: no teacher
  // After every step, weights of neurons that were active on none of its tokens become
  // (1 - strength) w + strength N(0, std^2).
  bool reinit_dead = false;
  double reinit_strength = 0.1;
  double reinit_std = 0.02;
  FfnTrainPolicy ffn_policy = FfnTrainPolicy::kAuto;

  // CPU only: how it multiplies.
  MatmulCompute compute = MatmulCompute::kF32;
  // The type of AdamW's moments; bf16 is rounded stochastically (moment_rounding.h); a CPU keeps
  // the rounded values in f32.
  DType moment_dtype = DType::kF32;
  // The type of gradients between GPUs, where they are added in f32; bf16 halves the bytes.
  DType gradient_dtype = DType::kF32;
  // GPU only. Without a value: the least recomputation that fits into memory.
  std::optional<Recompute> recompute;

  int64_t validate_every = 100;       // steps; 0: never
  int64_t validation_sequences = 32;  // at most
  int64_t save_every = 500;           // steps; 0: at the end only
  int64_t keep_last = 2;              // checkpoints
  DType save_dtype = DType::kF32;     // of model.safetensors
  // Texts that the model writes in training, behind each of these prompts. None: one text from its
  // beginning.
  int64_t sample_every = 0;  // steps; 0: never
  std::vector<std::string> sample_prompts;
  int64_t sample_tokens = 48;  // of a text, at most
  uint64_t seed = 0;

  int64_t micro_batch_tokens() const { return micro_batch * sequence_length; }
  int64_t micro_batches() const { return batch_tokens / micro_batch_tokens(); }
  int64_t batch_sequences() const { return batch_tokens / sequence_length; }
};

// The recipe's options for a model preset: steps and batch size. InputError for an unknown name.
TrainOptions preset_train_options(std::string_view preset);

// Fills in derived values and checks every value against its range, the other options and the
// model. InputError names the value and the reason.
TrainOptions resolve_options(TrainOptions options, const ModelConfig& config);

// The resolved options that determine the trained weights, without the length of the run, as the
// text of a JSON object.
std::string trajectory_text(const TrainOptions& options);

// Schedules: functions of the step, which counts from 0.

// Linear warm-up to learning_rate over warmup_steps, then the schedule, whose decay ends at
// min_lr_ratio of it behind the last step.
double learning_rate_at(const TrainOptions& options, int64_t step);
// The same for the matrices that Muon updates.
double matrix_learning_rate_at(const TrainOptions& options, int64_t step);

// The coefficient of (mean over layers, mean over tokens, sum over neurons of |h|): zero for
// l1_zero_steps, then linear growth over l1_ramp_steps; divided by `ffn` for the mean reduction.
double l1_coeff_at(const TrainOptions& options, int64_t step, int64_t ffn);

// Share of ReLU in the activation of a model being sparsified: it grows in equal parts over
// relufy_steps and then stays 1.
double relu_share_at(const TrainOptions& options, int64_t step);

}  // namespace twell
