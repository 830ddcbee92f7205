// SPDX-License-Identifier: Apache-2.0
// One registration function per subcommand, each defined in the file of its name.
#pragma once

#include "cli/options.h"

namespace twell::cli {

void add_train_command(CLI::App& app, CommonOptions& common);
void add_generate_command(CLI::App& app, CommonOptions& common);
void add_eval_command(CLI::App& app, CommonOptions& common);
void add_inspect_command(CLI::App& app, CommonOptions& common);
void add_bench_command(CLI::App& app, CommonOptions& common);
void add_report_command(CLI::App& app, CommonOptions& common);
void add_convert_command(CLI::App& app, CommonOptions& common);
void add_tokenize_command(CLI::App& app, CommonOptions& common);
void add_doctor_command(CLI::App& app, CommonOptions& common);

}  // namespace twell::cli
