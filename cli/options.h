// SPDX-License-Identifier: Apache-2.0
// The options that mean the same in every command. A command adds those it takes, so that their
// names, defaults and help text are written once.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace twell::cli {

// Filled by the parser; one for the whole program, because one command runs.
struct CommonOptions {
  std::vector<std::filesystem::path> data;
  std::filesystem::path checkpoint;
  std::filesystem::path out;
  uint64_t seed = 0;
  int threads = 0;
  std::string device = "auto";

  // What the chosen command does; returns the exit code. Set by the command's callback and called
  // by main after parsing.
  std::function<int()> run;
};

// Exit codes, the same in every command.
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;        // an internal error
inline constexpr int kExitInput = 2;          // what the user gave cannot be used
inline constexpr int kExitInterrupted = 130;  // SIGINT or SIGTERM, after saving

CLI::Option* add_data_option(CLI::App& command, CommonOptions& common, const std::string& help);
CLI::Option* add_checkpoint_option(CLI::App& command, CommonOptions& common);  // required
CLI::Option* add_out_option(CLI::App& command, CommonOptions& common, const std::string& help);
CLI::Option* add_seed_option(CLI::App& command, CommonOptions& common);
CLI::Option* add_threads_option(CLI::App& command, CommonOptions& common);
// The devices that a command runs on; what they mean is in device.h.
enum class Devices { kCpu, kAny };
CLI::Option* add_device_option(CLI::App& command, CommonOptions& common, Devices devices);
// --seed, --threads and --device: what every command that computes takes.
void add_compute_options(CLI::App& command, CommonOptions& common, Devices devices = Devices::kCpu);

// Adds a subcommand, `run` being what it does.
CLI::App& add_command(CLI::App& app, CommonOptions& common, const std::string& name,
                      const std::string& description, std::function<int()> run);

}  // namespace twell::cli
