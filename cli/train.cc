// SPDX-License-Identifier: Apache-2.0
#include "cli/commands.h"

namespace twell::cli {

void add_train_command(CLI::App& app, CommonOptions& common) {
  CLI::App& command = add_command(app, common, "train", "Train a language model on text",
                                  [] { return kExitFailure; });
  add_compute_options(command, common);
}

}  // namespace twell::cli
