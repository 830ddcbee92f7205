// SPDX-License-Identifier: Apache-2.0
#include "cli/options.h"

#include <limits>
#include <utility>

namespace twell::cli {
namespace {

constexpr const char* kComputeGroup = "Machine";

std::string check_cpu(const std::string& device) {
  if (device == "cpu" || device == "auto") return {};
  if (device == "cuda")
    return "this command does not run on cuda, only on the CPU; use cpu or auto";
  return "unknown device '" + device + "'; use cpu or auto";
}

std::string check_any(const std::string& device) {
  if (device == "cpu" || device == "cuda" || device == "auto") return {};
  return "unknown device '" + device + "'; use cpu, cuda or auto";
}

// CLI11 would take -1 for the largest unsigned number.
std::string check_not_negative(const std::string& value) {
  return value.starts_with('-') ? value + " is negative" : std::string();
}

}  // namespace

CLI::Option* add_data_option(CLI::App& command, CommonOptions& common, const std::string& help) {
  return command.add_option("--data", common.data, help)
      ->type_name("PATH")
      ->allow_extra_args(false);
}

CLI::Option* add_checkpoint_option(CLI::App& command, CommonOptions& common) {
  return command
      .add_option("--checkpoint", common.checkpoint,
                  "Checkpoint folder: config.json, model.safetensors, tokenizer.json")
      ->type_name("DIR")
      ->required();
}

CLI::Option* add_out_option(CLI::App& command, CommonOptions& common, const std::string& help) {
  return command.add_option("--out", common.out, help)->type_name("DIR");
}

CLI::Option* add_seed_option(CLI::App& command, CommonOptions& common) {
  return command
      .add_option("--seed", common.seed, "Seed of every random choice; same seed, same result")
      ->type_name("N")
      ->check(check_not_negative)
      ->capture_default_str()
      ->group(kComputeGroup);
}

CLI::Option* add_threads_option(CLI::App& command, CommonOptions& common) {
  return command
      .add_option("--threads", common.threads, "Threads to compute with; 0: every available core")
      ->type_name("N")
      ->check(CLI::Range(0, 4096).description(""))
      ->capture_default_str()
      ->group(kComputeGroup);
}

CLI::Option* add_device_option(CLI::App& command, CommonOptions& common, Devices devices) {
  const bool any = devices == Devices::kAny;
  return command
      .add_option("--device", common.device,
                  any ? "Device to compute on: cpu, cuda, or auto, a GPU where there is one"
                      : "Device to compute on: auto or cpu")
      ->type_name("NAME")
      ->check(any ? check_any : check_cpu)
      ->capture_default_str()
      ->group(kComputeGroup);
}

void add_compute_options(CLI::App& command, CommonOptions& common, Devices devices) {
  add_seed_option(command, common);
  add_threads_option(command, common);
  add_device_option(command, common, devices);
}

CLI::App& add_command(CLI::App& app, CommonOptions& common, const std::string& name,
                      const std::string& description, std::function<int()> run) {
  CLI::App* command = app.add_subcommand(name, description)->group("Commands");
  command->callback([&common, run = std::move(run)] { common.run = run; });
  return *command;
}

}  // namespace twell::cli
