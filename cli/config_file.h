// SPDX-License-Identifier: Apache-2.0
// Options out of a file: TOML, or JSON when its name ends in .json. Keys are the command's long
// option names, '_' and '-' alike; tables and objects only group. Options given before (flags) win.
#pragma once

#include <filesystem>
#include <set>
#include <string>

#include "cli/command_line.h"

namespace twell::cli {

// Gives every option named in the file, and not given yet, its value from there. InputError on a
// key that is no option of the command, cannot be set by a file, or appears twice.
void apply_config_file(Command& command, const std::filesystem::path& file);

// The options given so far as a JSON file that apply_config_file takes. Values of the options in
// `paths` are made absolute.
std::string given_options_json(const Command& command, const std::set<std::string>& paths);

}  // namespace twell::cli
