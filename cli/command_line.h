// SPDX-License-Identifier: Apache-2.0
// Commands and their options, declared as data. Parsing, help texts, configuration files and shell
// completion all use these declarations.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "twell/base/option.h"

namespace twell::cli {

// A command, its options, and its subcommands.
class Command {
 public:
  Command(std::string name, std::string description);

  // Options declared after this call appear under this heading in the help.
  void group(std::string heading) { group_ = std::move(heading); }
  // `type` names the value in the help. The target variable must outlive the command.
  Option& value(std::string flag, OptionTarget target, std::string type, std::string help);
  // An option with a few values, which the help lists.
  Option& choice(std::string flag, OptionTarget target, std::vector<std::string> values,
                 std::string help);
  Option& flag(std::string flag, OptionTarget target, std::string help);
  // A flag and its negated spelling; with an empty `flag` only the negated spelling exists.
  Option& flag(std::string flag, std::string negated, OptionTarget target, std::string help);
  // Takes a declared option; the table of a training run's declares its own.
  Option& add(Option option);
  // A required positional argument.
  Option& word(std::string name, OptionTarget target, std::string help);
  // Declares --config FILE. Parsing applies the file before it sets variables.
  void config_file();
  // Text at the end of the help.
  void footer(std::string text) { footer_ = std::move(text); }
  // Adds a subcommand.
  Command& add(std::string name, std::string description);
  // Root command only: called before any command runs, once its variables are set.
  void before_running(std::function<void()> prepare) { prepare_ = std::move(prepare); }
  // Root command only: called for words that have no effect, with a sentence that says so.
  void on_warning(std::function<void(const std::string&)> warn) { warn_ = std::move(warn); }
  // The function that runs the command once its variables are set; it returns the exit code.
  void runs(std::function<int()> run) { run_ = std::move(run); }

  // Finds an option by its name without dashes; null when there is none. Sets `negated` when the
  // name is the negated spelling.
  Option* find(std::string_view name, bool* negated = nullptr);
  Option& at(std::string_view name);
  const std::vector<std::unique_ptr<Option>>& options() const { return options_; }

  const std::vector<std::unique_ptr<Command>>& commands() const { return commands_; }
  const std::string& name() const { return name_; }
  const std::string& description() const { return description_; }
  std::string help(const std::string& path) const;  // path: "twell bench decode"

 private:
  friend class Parser;

  std::string name_, description_, footer_;
  std::string group_ = "Options";
  std::filesystem::path config_;
  std::vector<std::unique_ptr<Option>> options_;
  std::vector<std::unique_ptr<Command>> commands_;
  std::function<void()> prepare_;
  std::function<void(const std::string&)> warn_;
  std::function<int()> run_;
};

// Parses the arguments, sets the variables of the selected command, and runs it. Returns its exit
// code. Handles --help and --version itself. InputError when the arguments cannot be used.
int run_command_line(Command& root, int argc, char** argv);

// The script that completes the commands and options of `root` in bash, zsh or fish.
std::string completion_script(const Command& root, std::string_view shell);

}  // namespace twell::cli
