// SPDX-License-Identifier: Apache-2.0
// Commands and their options, declared as data. Parsing, help texts, configuration files and shell
// completion all use these declarations. Only command_line.cc includes the parser library (CLI11),
// because its templates are slow to compile.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace twell::cli {

// The variable that an option sets. Its type decides which values are accepted: a flag, an integer
// (also written 1e6, 20k, 1M, 2G), a real number, or text. Vectors collect every occurrence of an
// option.
using Target =
    std::variant<bool*, std::optional<bool>*, int*, int64_t*, uint64_t*, std::optional<int64_t>*,
                 float*, double*, std::optional<double>*, std::string*, std::optional<std::string>*,
                 std::filesystem::path*, std::vector<int64_t>*, std::vector<double>*,
                 std::vector<std::string>*, std::vector<std::filesystem::path>*>;

// One option of a command. Each setter returns the option itself.
class Option {
 public:
  Option& required(bool value = true);
  // Inclusive bounds of a number. A value outside them is an InputError that names the bounds.
  Option& at_least(double lowest);
  Option& range(double lowest, double highest);
  // The only values that are accepted.
  Option& choices(std::vector<std::string> values);
  // Another option that must (needs), or must not (excludes), be given together with this one.
  Option& needs(Option& other);
  Option& excludes(Option& other);
  // A configuration file cannot set this option.
  Option& not_in_files();
  // The help does not show the value that the variable had when the option was declared.
  Option& hide_default();
  // One occurrence may be followed by several values, as in --batch 1 8 64.
  Option& several_values();
  // The option may be given without a value, which leaves its variable unchanged.
  Option& value_optional();

  // Whether the command line or a configuration file set the option.
  bool given() const { return !values_.empty(); }
  // The name without dashes: "micro-batch".
  std::string name() const;
  // The values as the user typed them; "true" or "false" for flags.
  const std::vector<std::string>& values() const { return values_; }
  bool settable_by_file() const { return in_files_; }
  // Sets the variable. InputError when a value cannot be used. `negated`: a flag was given in its
  // negated spelling.
  void set(std::vector<std::string> values, bool negated = false);

 private:
  friend class Command;
  friend class Parser;
  friend std::string completion_script(const class Command& root, std::string_view shell);

  Option(std::string flag, std::string negated, Target target, std::string type, std::string help,
         std::string group);
  bool is_flag() const;
  bool collects() const;  // whether the target is a vector
  std::string help_suffix() const;
  std::string help_text() const;  // with the options that it needs or excludes
  // Reads text into the variable, or into a new element of a list.
  template <typename T>
  void read(const std::string& text, T& target) const;
  template <typename Number>
  Number whole_number(const std::string& text) const;
  double real_number(const std::string& text) const;
  void check_range(double value, const std::string& text) const;

  std::string flag_;     // "--steps", or "SHELL" for a positional argument
  std::string negated_;  // "--no-gated", or empty
  Target target_;
  std::string type_;  // how the help names the value: "N", "DIR"
  std::string help_;
  std::string group_;
  std::string default_;
  double lowest_ = -std::numeric_limits<double>::infinity();
  double highest_ = std::numeric_limits<double>::infinity();
  std::vector<std::string> choices_;
  std::vector<const Option*> needs_, excludes_;
  bool required_ = false, in_files_ = true, several_ = false, optional_ = false;
  std::vector<std::string> values_;
};

// A command, its options, and its subcommands.
class Command {
 public:
  Command(std::string name, std::string description);

  // Options declared after this call appear under this heading in the help.
  void group(std::string heading) { group_ = std::move(heading); }
  // `type` names the value in the help. The target variable must outlive the command.
  Option& value(std::string flag, Target target, std::string type, std::string help);
  // An option with a few values, which the help lists.
  Option& choice(std::string flag, Target target, std::vector<std::string> values,
                 std::string help);
  Option& flag(std::string flag, Target target, std::string help);
  // A flag and its negated spelling; with an empty `flag` only the negated spelling exists.
  Option& flag(std::string flag, std::string negated, Target target, std::string help);
  // A required positional argument.
  Option& word(std::string name, Target target, std::string help);
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

 private:
  friend class Parser;
  friend std::string completion_script(const Command& root, std::string_view shell);

  std::string name_, description_, footer_;
  std::string group_ = "Options";
  std::filesystem::path config_;
  bool takes_config_ = false;
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
