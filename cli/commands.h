// SPDX-License-Identifier: Apache-2.0
// One registration function per subcommand, each defined in the file of its name.
#pragma once

#include "cli/options.h"

namespace twell::cli {

void add_train_command(CLI::App& app, CommonOptions& common);
void add_tokenize_command(CLI::App& app, CommonOptions& common);

}  // namespace twell::cli
