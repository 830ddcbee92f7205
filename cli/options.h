// SPDX-License-Identifier: Apache-2.0
// Options that several commands share, so that names, defaults and help texts are defined once.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "cli/command_line.h"
#include "twell/base/dtype.h"
#include "twell/checkpoint/tensor_load.h"

namespace twell::cli {

// Filled by the parser. One instance serves the program, because only one command runs.
struct CommonOptions {
  std::vector<std::filesystem::path> data;
  std::filesystem::path checkpoint;
  bool allow_non_finite = false;   // accept NaN and infinity in the checkpoint
  std::string weights = "stored";  // "stored", "fp8" or "int8"
  std::string head = "stored";     // "stored" or "8bit"
  std::string compute = "f32";     // "f32" or "bf16", of a CPU's products
  std::filesystem::path out;
  uint64_t seed = 0;
  int threads = 0;
  std::string device = "auto";
};

DType parse_dtype(std::string_view name);  // "f32", "bf16" or "f16"

// Exit codes of every command. A signal ends a command with 128 plus its number.
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;  // an internal error, or output that cannot be written
inline constexpr int kExitInput = 2;    // unusable arguments or input files

// Replaces a training run's folder by its newest checkpoint, and the path "-" of --data by a file
// with the contents of standard input (plain text), which is read here.
void resolve_inputs(CommonOptions& common);

Option& add_data_option(Command& command, CommonOptions& common, std::string help);
Option& add_checkpoint_option(Command& command, CommonOptions& common);  // required
// Declares --allow-non-finite; add_checkpoint_option calls it.
void add_non_finite_option(Command& command, CommonOptions& common);
// --ffn, an execution of the feed-forward layers; `what` begins its help.
Option& add_ffn_option(Command& command, std::string& name, const std::string& what);
Option& add_preset_option(Command& command, std::string& name, std::string help);
Option& add_out_option(Command& command, CommonOptions& common, std::string help);
// Declares --speculate.
void add_speculate_option(Command& command, int64_t& speculate);
// Guessed tokens that a session takes in a step: those of a few sequences.
int64_t draft_tokens_of(int64_t speculate, int64_t slots);
// Declares --weights and --head, the types in which the checkpoint's projections and its output
// head are loaded, and --compute, that in which a CPU multiplies them.
void add_weights_option(Command& command, CommonOptions& common);
// How to load the checkpoint: --weights, --head and --allow-non-finite.
LoadOptions load_options(const CommonOptions& common);
// The options below appear under the heading "Machine".
void add_seed_option(Command& command, CommonOptions& common);
void add_threads_option(Command& command, CommonOptions& common);
void add_device_option(Command& command, CommonOptions& common);  // --device: see device.h
// Declares --seed, --threads and --device.
void add_compute_options(Command& command, CommonOptions& common);

}  // namespace twell::cli
