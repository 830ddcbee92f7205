// SPDX-License-Identifier: Apache-2.0
// The options that mean the same in every command, so that their names, defaults and help texts are
// written once.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "cli/command_line.h"

namespace twell::cli {

// Filled by the parser; one for the whole program, because one command runs.
struct CommonOptions {
  std::vector<std::filesystem::path> data;
  std::filesystem::path checkpoint;
  bool allow_non_finite = false;  // of the checkpoint's weights
  std::filesystem::path out;
  uint64_t seed = 0;
  int threads = 0;
  std::string device = "auto";
};

// Exit codes, the same in every command. A signal ends a command with 128 and its number.
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;  // an internal error, or output that cannot be written
inline constexpr int kExitInput = 2;    // what the user gave cannot be used

// What stands for other paths: the folder of a training run for its newest checkpoint; the path "-"
// of --data for standard input, which is read here, as plain text.
void resolve_inputs(CommonOptions& common);
std::filesystem::path checkpoint_folder(const std::filesystem::path& folder);

Option& add_data_option(Command& command, CommonOptions& common, std::string help);
Option& add_checkpoint_option(Command& command, CommonOptions& common);  // required
// --allow-non-finite; add_checkpoint_option adds it too.
void add_non_finite_option(Command& command, CommonOptions& common);
Option& add_out_option(Command& command, CommonOptions& common, std::string help);
// These stand under the heading "Machine".
void add_seed_option(Command& command, CommonOptions& common);
void add_threads_option(Command& command, CommonOptions& common);
// --seed, --threads and --device; what devices mean is in device.h.
void add_compute_options(Command& command, CommonOptions& common);

}  // namespace twell::cli
