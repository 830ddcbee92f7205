// SPDX-License-Identifier: Apache-2.0
// Commands and their options, declared as data. Parsing, help texts, configuration files and shell
// completion all read these declarations. The parser behind it (CLI11) is known to command_line.cc
// alone, which keeps its templates out of every other file.
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

// The variable that an option sets, and with it the kind of its value: a flag, a whole number (also
// written 1e6, 20k, 1M, 2G), a real number, or text. Vectors collect every occurrence of an option.
using Target =
    std::variant<bool*, std::optional<bool>*, int*, int64_t*, uint64_t*, std::optional<int64_t>*,
                 float*, double*, std::optional<double>*, std::string*, std::optional<std::string>*,
                 std::filesystem::path*, std::vector<int64_t>*, std::vector<double>*,
                 std::vector<std::string>*, std::vector<std::filesystem::path>*>;

// One option of a command. Each setter returns the option itself.
class Option {
 public:
  Option& required(bool value = true);
  // Bounds of a number, both allowed. Other values are an InputError that names them.
  Option& at_least(double lowest);
  Option& range(double lowest, double highest);
  // The only values that are taken.
  Option& choices(std::vector<std::string> values);
  // Another option that must, or must not, be given together with this one.
  Option& needs(Option& other);
  Option& excludes(Option& other);
  // A configuration file cannot set this option.
  Option& not_in_files();
  // The help does not show the value that the variable had when the option was declared.
  Option& hide_default();
  // One occurrence may be followed by several values: --batch 1 8 64.
  Option& several_values();
  // The option may stand without a value, which leaves its variable as it was.
  Option& value_optional();

  // Whether the command line or a configuration file sets it.
  bool given() const { return !values_.empty(); }
  // The name without dashes: "micro-batch".
  std::string name() const;
  // As the user typed the values; "true" or "false" for flags.
  const std::vector<std::string>& values() const { return values_; }
  bool settable_by_file() const { return in_files_; }
  // Sets the variable. InputError when a value cannot be used. `negated`: a flag's negated
  // spelling.
  void set(std::vector<std::string> values, bool negated = false);

 private:
  friend class Command;
  friend class Parser;
  friend std::string completion_script(const class Command& root, std::string_view shell);

  Option(std::string flag, std::string negated, Target target, std::string type, std::string help,
         std::string group);
  bool is_flag() const;
  bool collects() const;  // into a vector
  std::string help_suffix() const;
  void set_one(const std::string& text);
  template <typename Number>
  Number whole_number(const std::string& text) const;
  double real_number(const std::string& text) const;
  void check_range(double value, const std::string& text) const;

  std::string flag_;     // "--steps", or "SHELL" for a word without a flag
  std::string negated_;  // "--no-gated", or empty
  Target target_;
  std::string type_;  // what the help calls the value: "N", "DIR"
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

// A command, its options, and the commands below it.
class Command {
 public:
  Command(std::string name, std::string description);

  // Options declared from here on stand under this heading of the help.
  void group(std::string heading) { group_ = std::move(heading); }
  // `type` names the value in the help. The variable must outlive the command.
  Option& value(std::string flag, Target target, std::string type, std::string help);
  Option& flag(std::string flag, Target target, std::string help);
  // A flag that is turned off by another spelling; an empty `flag` leaves only that one.
  Option& flag(std::string flag, std::string negated, Target target, std::string help);
  // A word without a flag in front; it is required.
  Option& word(std::string name, Target target, std::string help);
  // Declares --config FILE, which parsing applies before it sets variables.
  void config_file();
  // Text behind the options of the help.
  void footer(std::string text) { footer_ = std::move(text); }
  // A command below this one.
  Command& add(std::string name, std::string description);
  // Of the root: called before any command runs, once its variables are set.
  void before_running(std::function<void()> prepare) { prepare_ = std::move(prepare); }
  // What the command does once its variables are set; it returns the exit code.
  void runs(std::function<int()> run) { run_ = std::move(run); }

  // By its name without dashes; null when there is none. `negated` tells the spelling.
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
  std::function<int()> run_;
};

// Reads the arguments, sets the variables of the command that they name, and runs it. Returns its
// exit code. --help and --version are answered here. InputError when the arguments cannot be used.
int run_command_line(Command& root, int argc, char** argv);

// The script that completes the commands and options of `root` in bash, zsh or fish.
std::string completion_script(const Command& root, std::string_view shell);

}  // namespace twell::cli
