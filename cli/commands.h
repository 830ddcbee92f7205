// SPDX-License-Identifier: Apache-2.0
// One registration function per subcommand, each defined in the file of its name.
#pragma once

#include "cli/options.h"

namespace twell::cli {

void add_train_command(Command& root, CommonOptions& common);
void add_generate_command(Command& root, CommonOptions& common);
void add_serve_command(Command& root, CommonOptions& common);
void add_eval_command(Command& root, CommonOptions& common);
void add_inspect_command(Command& root, CommonOptions& common);
void add_bench_command(Command& root, CommonOptions& common);
void add_report_command(Command& root, CommonOptions& common);
void add_convert_command(Command& root, CommonOptions& common);
void add_tokenize_command(Command& root, CommonOptions& common);
void add_doctor_command(Command& root);
void add_dump_command(Command& root, CommonOptions& common);
void add_completion_command(Command& root);

}  // namespace twell::cli
