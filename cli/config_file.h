// SPDX-License-Identifier: Apache-2.0
// Reads options from a file: TOML, or JSON when its name ends in .json. Keys are the command's long
// option names, with '_' or '-'; tables and objects only group them. Flags given earlier take
// precedence.
#pragma once

#include <filesystem>
#include <set>
#include <string>

#include "cli/command_line.h"

namespace twell::cli {

// Sets every option that the file names and that is not set yet. InputError on a key that is not an
// option of the command, that a file may not set, or that appears twice.
void apply_config_file(Command& command, const std::filesystem::path& file);

// The same for the options that given_options_json has saved, but for those in `skipped`.
// InputError, with both values, when an option in `fixed` was given with another value than saved.
void apply_saved_options(Command& command, const std::filesystem::path& file,
                         const std::set<std::string>& fixed, const std::set<std::string>& skipped);

// The options set so far as a JSON file that apply_saved_options accepts. Values of the options in
// `paths` are made absolute. A byte that is not UTF-8 is saved as a character of U+F780 to U+F7FF.
std::string given_options_json(const Command& command, const std::set<std::string>& paths);

}  // namespace twell::cli
