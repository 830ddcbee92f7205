// SPDX-License-Identifier: Apache-2.0
// Every hyper-parameter of a training run. Defaults are the published recipe where it names a
// value; sizes left at 0 are derived by resolve_options.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include "twell/base/dtype.h"
#include "twell/model/config.h"
#include "twell/model/recompute.h"
#include "twell/ops/ffn_train/ffn_train.h"

namespace twell {

// "none", "norms", "inputs" or "qkv", the last three also with the number of layers they are for:
// "qkv:8"; "auto" is none of these. InputError.
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
  // Sparsifying a model with another activation: it gives way to ReLU at once, or over so many
  // steps. kRelu: there is nothing to replace.
  Activation relufy_from = Activation::kRelu;
  int64_t relufy_steps = 0;
  double distill = 0.0;          // share of KL(teacher || model) in the loss; 0: no teacher
  bool reinit_dead = false;      // after every step, for neurons that no token of it activated:
  double reinit_strength = 0.1;  // w <- (1 - strength) w + strength N(0, std^2)
  double reinit_std = 0.02;
  FfnTrainPolicy ffn_policy = FfnTrainPolicy::kAuto;

  DType moment_dtype = DType::kF32;  // of AdamW's moments in memory: f32, or on the GPU bf16
  // On the GPU; the CPU keeps everything. Not given: the least that fits into the memory.
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

// The (resolved) options that decide what the weights become, without the length of the run.
nlohmann::json trajectory_json(const TrainOptions& options);

}  // namespace twell
