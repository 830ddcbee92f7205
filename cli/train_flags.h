// SPDX-License-Identifier: Apache-2.0
// The options of `twell train`, and the model configuration and TrainOptions made from them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "cli/options.h"
#include "cli/prepare_data.h"
#include "cli/task_comparison.h"
#include "twell/model/config.h"
#include "twell/train/options.h"

namespace twell::cli {

// Values that are not given come from the preset.
struct ModelFlags {
  std::optional<std::string> preset;
  std::optional<int64_t> width, ffn, layers, heads, kv_heads, head_dim, context, vocab_size;
  std::optional<bool> gated, tied;
  std::optional<double> rope_theta, norm_eps, init_std;
  std::optional<std::string> activation;

  bool any() const;
};

struct TrainFlags {
  DataOptions data;
  std::filesystem::path shards;
  std::filesystem::path from;
  bool relufy = false;
  TaskComparisonOptions tasks;  // evaluated after sparsifying
  bool resume = false;
  std::optional<int64_t> resume_from;  // step of the checkpoint to resume from
  bool fall_back = false;
  bool dry_run = false;
  bool tensorboard = false;
  double log_interval = 10.0;         // seconds
  int64_t gpus = 0, ranks = 0;        // ranks to start on this machine; 0: none
  double collective_timeout = 120.0;  // seconds
  int64_t max_restarts = 0;
  ModelFlags model;
  TrainOptions train;
  std::optional<int64_t> steps, tokens, batch_tokens;  // a preset may set these
  std::string l1_reduction = "sum";
  std::string ffn_policy = "auto";
  std::string save_dtype = "f32";
  std::string recompute = "auto";
  std::string moment_dtype = "f32";
  std::string gradient_dtype = "f32";
};

void add_train_flags(Command& command, TrainFlags& flags);

// The options in which `config` differs from that of a saved model, with both values.
std::string differing_options(const ModelConfig& config, const ModelConfig& saved);

// The configuration of the model to train; vocab_size is that of the flags or the preset.
ModelConfig model_config(const ModelFlags& flags);
// The result is not resolved yet.
TrainOptions train_options(const TrainFlags& flags, const CommonOptions& common);

}  // namespace twell::cli
