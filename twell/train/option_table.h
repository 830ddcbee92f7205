// SPDX-License-Identifier: Apache-2.0
// What a user can set of a training run: one table, from which come the flags of `twell train`, the
// keys of its configuration files, the keyword arguments of Python's Trainer, and their help. Each
// row has an option's name, the values that it takes, its help, and the variable that it sets.
// Checks that join several options, or need the model, are in start.h and resolve_options.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>

#include "twell/base/option.h"
#include "twell/train/options.h"

namespace twell {

// The variables of the table. Optional ones that are not set come from the preset, or from the
// checkpoint that the run starts from.
struct RunSettings {
  std::filesystem::path from;  // a checkpoint to start from
  bool tensorboard = false;
  std::optional<std::string> preset, activation;
  std::optional<int64_t> width, ffn, layers, heads, kv_heads, head_dim, context, vocab_size;
  std::optional<bool> gated, tied;
  std::optional<double> rope_theta, norm_eps, init_std;
  std::optional<int64_t> steps, tokens, batch_tokens;
  std::optional<double> l1;
  bool relufy = false;
  std::filesystem::path chat_data, chat_template;  // empty: text; the checkpoint's template
  TrainOptions train;  // in part: the names below, and the optional ones above, are not in it yet
  std::string schedule = "cosine", l1_reduction = "sum", ffn_policy = "auto", save_dtype = "f32",
              recompute = "auto", optimizer = "adamw", moment_dtype = "f32", gradient_dtype = "f32",
              compute = "f32";

  bool sets_model() const;  // whether an option of the model is set
};

using OptionVariable = OptionTarget (*)(RunSettings&);
struct OptionRow {
  const char* name;            // "lr"; a flag may have a second, negated spelling: "gated/no-gated"
  OptionRange range{};         // of a number
  const char* type = "";       // how the help names a value: "N"; empty for a flag
  const char* values = "";     // the only ones, "f32|bf16", in place of a type
  const char* proposals = "";  // some of many, for completion
  const char* help;
  OptionVariable member;
};
struct OptionGroup {
  const char* heading;
  std::span<const OptionRow> rows;
};
std::span<const OptionGroup> option_table();

// The row as an option that sets the variable of these settings.
Option make_option(const OptionRow& row, const char* heading, RunSettings& settings);

// InputError when a number of the options is out of its row's range.
void check_ranges(const TrainOptions& options);

}  // namespace twell
