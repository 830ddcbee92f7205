// SPDX-License-Identifier: Apache-2.0
// A named value that a user sets: as a flag of a command, as a key of a file, or as a keyword
// argument. The declaration says which values it takes, and reading one sets a variable.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace twell {

// The variable that an option sets. Its type decides which values are accepted: a flag, an integer
// (also written 1e6, 20k, 1M, 2G), a real number, or text. Vectors collect every occurrence of an
// option.
using OptionTarget =
    std::variant<bool*, std::optional<bool>*, int*, int64_t*, uint64_t*, std::optional<int64_t>*,
                 float*, double*, std::optional<double>*, std::string*, std::optional<std::string>*,
                 std::filesystem::path*, std::vector<int64_t>*, std::vector<double>*,
                 std::vector<std::string>*, std::vector<std::filesystem::path>*>;

// The numbers that an option takes. Without bounds all finite ones.
struct OptionRange {
  double lowest = -std::numeric_limits<double>::infinity();
  double highest = std::numeric_limits<double>::infinity();
  bool above = false;  // lowest itself is excluded
  bool below = false;  // highest itself is excluded

  bool holds(double value) const;  // false for NaN
  std::string text() const;        // "1 to 8", "at least 0", "above 0 and at most 10"
};

// Setters return the option itself.
class Option {
 public:
  // flag: "--steps", or "SHELL" for a positional word. negated: "--no-gated", or empty. type: how
  // the help names the value, "N" or "DIR"; empty for a flag.
  Option(std::string flag, std::string negated, OptionTarget target, std::string type,
         std::string help, std::string group);

  Option& required(bool value = true);
  // A number outside these bounds is an InputError that names them.
  Option& range(OptionRange range);
  Option& range(double lowest, double highest) { return range(OptionRange{lowest, highest}); }
  Option& at_least(double lowest) { return range(OptionRange{.lowest = lowest}); }
  // The only values that are accepted.
  Option& choices(std::vector<std::string> values);
  // Values that completion proposes; others are accepted too.
  Option& suggests(std::vector<std::string> values);
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
  // How messages name the option, where that is not the flag.
  Option& called(std::string name);

  const std::string& flag() const { return flag_; }
  const std::string& negated() const { return negated_; }
  const std::string& help() const { return help_; }
  const std::string& group() const { return group_; }
  const std::string& type() const { return type_; }
  const std::vector<std::string>& proposals() const { return proposals_; }
  const OptionTarget& target() const { return target_; }
  std::string name() const;  // the flag without dashes: "micro-batch"
  bool is_flag() const;
  bool is_word() const { return !flag_.starts_with('-') && negated_.empty(); }
  bool collects() const;  // whether the target is a vector
  bool takes_several() const { return several_; }
  bool is_value_optional() const { return optional_; }
  bool settable_by_file() const { return in_files_; }

  // Sets the variable. InputError when a value cannot be used. `negated`: a flag was given in its
  // negated spelling. For an option whose value may be omitted, no values.
  void set(std::vector<std::string> values, bool negated = false);
  // Whether the option was set.
  bool given() const { return given_; }
  // The values as the user typed them; "true" or "false" for flags.
  const std::vector<std::string>& values() const { return values_; }
  // The value that the variable had when the option was declared; empty when it has no text.
  std::vector<std::string> default_values() const;
  // Whether the two mean the same: 1e3 and 1000, a path and its absolute spelling.
  bool same(const std::vector<std::string>& a, const std::vector<std::string>& b) const;
  // InputError when the variable's number is out of bounds, however it was set.
  void check_variable() const;
  // Whether an option was given that excludes this one.
  bool excluded() const;
  // InputError when the option is missing, or was given beside one that excludes it, or without one
  // that it needs.
  void check_others() const;

  // The parts of the help: "--no-gated", "N=8 ...", and the text with the options that it needs or
  // excludes.
  std::string help_names() const;
  std::string help_text() const;

 private:
  // Reads text into the variable, or into a new element of a list.
  template <typename T>
  void read(const std::string& text, T& target) const;
  template <typename Number>
  Number whole_number(const std::string& text) const;
  double real_number(const std::string& text) const;
  void check_range(double value, const std::string& text) const;

  std::string flag_, negated_;
  OptionTarget target_;
  std::string type_, help_, group_, label_, default_;
  OptionRange range_;
  std::vector<std::string> choices_, proposals_;
  std::vector<const Option*> needs_, excludes_;
  bool required_ = false, in_files_ = true, several_ = false, optional_ = false;
  bool given_ = false, shows_default_ = true;
  std::vector<std::string> values_;
};

}  // namespace twell
