// SPDX-License-Identifier: Apache-2.0
#include "cli/commands.h"

namespace twell::cli {

void add_tokenize_command(CLI::App& app, CommonOptions& common) {
  CLI::App& command = add_command(app, common, "tokenize", "Turn text into shards of token ids",
                                  [] { return kExitFailure; });
  add_compute_options(command, common);
}

}  // namespace twell::cli
