// SPDX-License-Identifier: Apache-2.0
#include "cli/command_line.h"

#include <fmt/core.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>

#include "cli/config_file.h"
#include "cli/text_layout.h"
#include "twell/base/error.h"

namespace twell::cli {
namespace {

// CLI11's suffix for a negated flag such as --no-gated{false}: the flag yields "false".
constexpr std::string_view kFalse = "{false}";

// Columns of the help, and the one where descriptions begin.
constexpr size_t kHelpWidth = 80;
constexpr size_t kHelpColumn = 30;

std::optional<bool> parse_truth(std::string_view text) {
  for (const char* yes : {"true", "1", "on", "yes"}) {
    if (text == yes) return true;
  }
  for (const char* no : {"false", "0", "off", "no"}) {
    if (text == no) return false;
  }
  return std::nullopt;
}

template <typename Number>
bool parse_exactly(std::string_view text, Number& value) {
  if (text.starts_with('+')) text.remove_prefix(1);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

// Replaces the suffix of 20k, 1.5M, 2G or 2B, 1T by a decimal exponent; 1e6 stays as it is.
std::string spell_out_suffix(std::string_view text) {
  if (text.empty() || text.find_first_of("eE") != std::string_view::npos) return std::string(text);
  constexpr std::pair<char, const char*> kExponents[] = {{'k', "e3"}, {'K', "e3"}, {'M', "e6"},
                                                         {'G', "e9"}, {'B', "e9"}, {'T', "e12"}};
  for (const auto& [suffix, exponent] : kExponents) {
    if (text.back() == suffix) return std::string(text.substr(0, text.size() - 1)) + exponent;
  }
  return std::string(text);
}

// "a, b or c".
std::string alternatives(const std::vector<std::string>& names) {
  if (names.size() < 2) return fmt::format("{}", fmt::join(names, ""));
  return fmt::format("{} or {}", fmt::join(names.begin(), names.end() - 1, ", "), names.back());
}

// Number of insertions, deletions, replacements and swaps of neighbours between the two words.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> rows(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) rows[i][0] = i;
  std::iota(rows[0].begin(), rows[0].end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      rows[i][j] = std::min({rows[i - 1][j] + 1, rows[i][j - 1] + 1,
                             rows[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        rows[i][j] = std::min(rows[i][j], rows[i - 2][j - 2] + 1);
      }
    }
  }
  return rows[a.size()][b.size()];
}

// "; did you mean NAME?" when a name is within a small edit distance, else `otherwise`.
std::string did_you_mean(const std::string& word, const std::vector<std::string>& names,
                         const std::string& otherwise) {
  const std::string* best = nullptr;
  size_t least = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string& name : names) {
    if (const size_t distance = edit_distance(word, name); distance < least) {
      least = distance;
      best = &name;
    }
  }
  return best == nullptr ? otherwise : fmt::format("; did you mean {}?", *best);
}

// Refills the paragraphs of a footer. Indented lines, which are commands, and the lines in front of
// them stay as they are.
std::string refilled(std::string_view footer) {
  std::string text, paragraph;
  const auto flush = [&] {
    if (!paragraph.empty()) text += wrapped(paragraph, 0, 0, kHelpWidth) + "\n";
    paragraph.clear();
  };
  while (!footer.empty()) {
    const size_t end = std::min(footer.find('\n'), footer.size());
    const std::string_view line = footer.substr(0, end);
    footer.remove_prefix(std::min(end + 1, footer.size()));
    if (line.empty() || line.starts_with(' ')) {
      flush();
      text.append(line).append("\n");
    } else {
      paragraph.append(paragraph.empty() ? "" : " ").append(line);
    }
  }
  flush();
  text.pop_back();
  return text;
}

// Wraps the second column of CLI11's help, and leaves one blank line where CLI11 writes two.
std::string wrapped_help(std::string_view help) {
  std::string text;
  while (!help.empty()) {
    const size_t end = std::min(help.find('\n'), help.size());
    const std::string_view line = help.substr(0, end);
    help.remove_prefix(std::min(end + 1, help.size()));
    if (line.empty() && text.ends_with("\n\n")) continue;
    const bool two_columns = line.size() > kHelpColumn && line[kHelpColumn] != ' ' &&
                             line[kHelpColumn - 1] == ' ' &&
                             (line.starts_with("  -") || line[kHelpColumn - 2] == ' ');
    if (two_columns) {
      text.append(line.substr(0, kHelpColumn));
      text += wrapped(line.substr(kHelpColumn), kHelpColumn, kHelpColumn, kHelpWidth);
    } else {
      text += line;
    }
    text += "\n";
  }
  return text;
}

template <typename T>
constexpr bool kIsList = false;
template <typename T>
constexpr bool kIsList<std::vector<T>> = true;
template <typename T>
constexpr bool kIsOptional = false;
template <typename T>
constexpr bool kIsOptional<std::optional<T>> = true;

// The default value shown in the help; empty for flags, lists of paths, empty text and empty lists.
template <typename T>
std::string default_text(const T& value) {
  if constexpr (std::is_same_v<T, std::filesystem::path>) {
    return value.string();
  } else if constexpr (std::is_same_v<T, std::string>) {
    return value;
  } else if constexpr (std::is_same_v<T, bool> || kIsOptional<T> ||
                       std::is_same_v<T, std::vector<std::filesystem::path>>) {
    return {};
  } else if constexpr (kIsList<T>) {
    return value.empty() ? std::string() : fmt::format("[{}]", fmt::join(value, ","));
  } else if constexpr (std::is_floating_point_v<T>) {
    return fmt::format("{:g}", value);
  } else {
    return fmt::format("{}", value);
  }
}

}  // namespace

Option::Option(std::string flag, std::string negated, Target target, std::string type,
               std::string help, std::string group)
    : flag_(std::move(flag)),
      negated_(std::move(negated)),
      target_(target),
      type_(std::move(type)),
      help_(std::move(help)),
      group_(std::move(group)),
      default_(std::visit([](const auto* value) { return default_text(*value); }, target)) {}

Option& Option::required(bool value) {
  required_ = value;
  return *this;
}

Option& Option::at_least(double lowest) {
  lowest_ = lowest;
  return *this;
}

Option& Option::range(double lowest, double highest) {
  lowest_ = lowest;
  highest_ = highest;
  return *this;
}

Option& Option::choices(std::vector<std::string> values) {
  choices_ = std::move(values);
  return *this;
}

Option& Option::needs(Option& other) {
  needs_.push_back(&other);
  return *this;
}

Option& Option::excludes(Option& other) {
  excludes_.push_back(&other);
  other.excludes_.push_back(this);
  return *this;
}

Option& Option::not_in_files() {
  in_files_ = false;
  return *this;
}

Option& Option::hide_default() {
  default_.clear();
  return *this;
}

Option& Option::several_values() {
  several_ = true;
  return *this;
}

Option& Option::value_optional() {
  optional_ = true;
  return *this;
}

std::string Option::name() const {
  const std::string& flag = flag_.empty() ? negated_ : flag_;
  return flag.substr(std::min(flag.find_first_not_of('-'), flag.size()));
}

bool Option::is_flag() const {
  return std::holds_alternative<bool*>(target_) ||
         std::holds_alternative<std::optional<bool>*>(target_);
}

bool Option::collects() const {
  return std::visit([]<typename T>(const T*) { return kIsList<T>; }, target_);
}

std::string Option::help_suffix() const {
  std::string text;
  if (!type_.empty()) text += " " + type_;
  if (!default_.empty()) text += "=" + default_;
  if (collects()) text += " ...";
  if (required_) text += " REQUIRED";
  return text.substr(text.empty() ? 0 : 1);  // CLI11 adds a leading space
}

std::string Option::help_text() const {
  std::string text = help_;
  for (const auto& [label, others] :
       {std::pair("with", &needs_), std::pair("not with", &excludes_)}) {
    if (others->empty()) continue;
    std::vector<std::string> names;
    for (const Option* other : *others) names.push_back("--" + other->name());
    text += fmt::format(" ({} {})", label, fmt::join(names, ", "));
  }
  return text;
}

void Option::check_range(double value, const std::string& text) const {
  const bool above = std::isfinite(lowest_), below = std::isfinite(highest_);
  if ((!above || value >= lowest_) && (!below || value <= highest_)) return;
  if (above && below) {
    throw InputError(
        fmt::format("{} must be {:.12g} to {:.12g}, got {}", flag_, lowest_, highest_, text));
  }
  throw InputError(fmt::format("{} must be at least {:.12g}, got {}", flag_, lowest_, text));
}

template <typename Number>
Number Option::whole_number(const std::string& text) const {
  Number value = 0;
  if (!parse_exactly(text, value)) {
    double real = 0.0;
    TWELL_REQUIRE(parse_exactly(spell_out_suffix(text), real) && real == std::nearbyint(real),
                  "{} must be a whole number, got '{}'", flag_, text);
    // Bounds near the type's limits are powers of two, which a double represents exactly.
    TWELL_REQUIRE(real < std::ldexp(1.0, std::numeric_limits<Number>::digits), "{} {} is too large",
                  flag_, text);
    TWELL_REQUIRE(real >= static_cast<double>(std::numeric_limits<Number>::min()),
                  std::is_signed_v<Number> ? "{} {} is too small" : "{} {} is negative", flag_,
                  text);
    value = static_cast<Number>(real);
  }
  check_range(static_cast<double>(value), text);
  return value;
}

double Option::real_number(const std::string& text) const {
  double value = 0.0;
  TWELL_REQUIRE(parse_exactly(text, value), "{} must be a number that can be represented, got '{}'",
                flag_, text);
  check_range(value, text);
  return value;
}

template <typename T>
void Option::read(const std::string& text, T& target) const {
  if constexpr (kIsList<T>) {
    read(text, target.emplace_back());
  } else if constexpr (kIsOptional<T>) {
    read(text, target.emplace());
  } else if constexpr (std::is_same_v<T, bool>) {
    target = text == "true";
  } else if constexpr (std::is_same_v<T, std::string>) {
    target = text;
  } else if constexpr (std::is_same_v<T, std::filesystem::path>) {
    // An empty path would count as an option that was not given.
    TWELL_REQUIRE(!text.empty(), "{} must be a path, got ''", flag_);
    target = text;
  } else if constexpr (std::is_floating_point_v<T>) {
    target = static_cast<T>(real_number(text));
  } else {
    target = whole_number<T>(text);
  }
}

void Option::set(std::vector<std::string> values, bool negated) {
  if (is_flag()) {
    TWELL_REQUIRE(values.size() == 1, "--{} takes one value", name());
    const std::optional<bool> truth = parse_truth(values.front());
    TWELL_REQUIRE(truth, "--{} must be true or false, got '{}'", name(), values.front());
    values = {*truth != negated ? "true" : "false"};
  }
  TWELL_REQUIRE(collects() || values.size() == 1, "{} takes one value, got {}", flag_,
                values.size());
  const auto assign = [&]<typename T>(T* target) {
    // A list replaces the default that its variable held when the option was declared.
    if constexpr (kIsList<T>) target->clear();
    for (const std::string& value : values) {
      // CLI11 passes "{}" for an omitted value.
      if (optional_ && (value.empty() || value == "{}")) continue;
      TWELL_REQUIRE(
          choices_.empty() || std::find(choices_.begin(), choices_.end(), value) != choices_.end(),
          "{} must be {}, got '{}'", flag_, alternatives(choices_), value);
      read(value, *target);
    }
  };
  std::visit(assign, target_);
  values_ = std::move(values);
}

Command::Command(std::string name, std::string description)
    : name_(std::move(name)), description_(std::move(description)) {}

Option& Command::value(std::string flag, Target target, std::string type, std::string help) {
  options_.push_back(std::unique_ptr<Option>(
      new Option(std::move(flag), "", target, std::move(type), std::move(help), group_)));
  return *options_.back();
}

Option& Command::choice(std::string flag, Target target, std::vector<std::string> values,
                        std::string help) {
  return value(std::move(flag), target, fmt::format("{}", fmt::join(values, "|")), std::move(help))
      .choices(std::move(values));
}

Option& Command::flag(std::string flag, Target target, std::string help) {
  return this->flag(std::move(flag), "", target, std::move(help));
}

Option& Command::flag(std::string flag, std::string negated, Target target, std::string help) {
  options_.push_back(std::unique_ptr<Option>(
      new Option(std::move(flag), std::move(negated), target, "", std::move(help), group_)));
  return *options_.back();
}

Option& Command::word(std::string name, Target target, std::string help) {
  return value(std::move(name), target, "", std::move(help)).required();
}

void Command::config_file() {
  takes_config_ = true;
  value("--config", &config_, "FILE",
        "TOML or JSON (*.json) file of options: the long names below as keys; flags win over it")
      .not_in_files();
}

Command& Command::add(std::string name, std::string description) {
  commands_.push_back(std::make_unique<Command>(std::move(name), std::move(description)));
  return *commands_.back();
}

Option* Command::find(std::string_view name, bool* negated) {
  for (const auto& option : options_) {
    for (const std::string* flag : {&option->flag_, &option->negated_}) {
      if (!flag->starts_with("--") || flag->substr(2) != name) continue;
      if (negated != nullptr) *negated = flag == &option->negated_;
      return option.get();
    }
  }
  return nullptr;
}

Option& Command::at(std::string_view name) {
  Option* option = find(name);
  TWELL_CHECK(option != nullptr, "no option --{}", name);
  return *option;
}

// Translates the declarations to CLI11, and the parsed values back to the options.
class Parser {
 public:
  explicit Parser(Command& root) : app_(root.description_, root.name_) {
    app_.set_version_flag("-V,--version", TWELL_VERSION, "Print the version and exit");
    app_.set_help_flag("-h,--help", "Print this help and exit");
    app_.formatter(std::make_shared<HelpFormatter>());
    app_.get_formatter()->column_width(kHelpColumn);
    app_.get_formatter()->label("SUBCOMMAND", "COMMAND");
    declare(app_, root);
  }

  int run(int argc, char** argv) {
    try {
      app_.parse(argc, argv);
    } catch (const CLI::CallForVersion&) {
      fmt::print("{}\n", TWELL_VERSION);
      return 0;
    } catch (const CLI::CallForHelp&) {
      fmt::print("{}", wrapped_help(app_.help()));
      return 0;
    } catch (const CLI::RequiredError&) {
      // A missing or unknown command is reported below.
    } catch (const CLI::ArgumentMismatch& error) {
      const std::string text = error.what();
      throw InputError(text.substr(0, text.find_first_of(": ")) + " needs a value");
    } catch (const CLI::Error& error) {
      throw InputError(error.what());
    }
    Level* level = &levels_.front();
    while (true) {
      refuse_unknown_words(*level);
      const auto chosen = level->app->get_subcommands();
      if (chosen.empty()) break;
      for (Level& below : levels_) {
        if (below.app == chosen.front()) level = &below;
      }
    }
    TWELL_REQUIRE(level->command->run_, "no command given; '{} --help' lists them", path(*level));
    set_options(*level);
    check_options(*level->command);
    if (levels_.front().command->prepare_) levels_.front().command->prepare_();
    return level->command->run_();
  }

 private:
  struct Level {
    CLI::App* app;
    Command* command;
    std::vector<std::pair<CLI::Option*, Option*>> options;
  };

  // CLI11 writes a negated flag as --no-gated{false}; the help omits the braces.
  class HelpFormatter : public CLI::Formatter {
    std::string make_option_name(const CLI::Option* option, bool positional) const override {
      std::string name = CLI::Formatter::make_option_name(option, positional);
      for (size_t at; (at = name.find(kFalse)) != std::string::npos;) name.erase(at, kFalse.size());
      return name;
    }
  };

  void declare(CLI::App& app, Command& command) {
    app.allow_extras();  // unknown arguments are reported by this class
    levels_.push_back({&app, &command, {}});
    const size_t level = levels_.size() - 1;
    for (const auto& option : command.options_) {
      levels_[level].options.emplace_back(declare(app, *option), option.get());
    }
    for (const auto& below : command.commands_) {
      declare(*app.add_subcommand(below->name_, below->description_)->group("Commands"), *below);
    }
    if (!command.commands_.empty()) app.require_subcommand(1);
    if (!command.footer_.empty())
      app.footer(refilled(command.footer_));  // last: subcommands inherit it
  }

  static CLI::Option* declare(CLI::App& app, const Option& option) {
    const std::string help = option.help_text();
    if (option.is_flag()) {
      std::string names = option.flag_;
      if (!option.negated_.empty()) names += (names.empty() ? "!" : ",!") + option.negated_;
      return app.add_flag(names, help)->option_text(option.help_suffix())->group(option.group_);
    }
    // Everything is parsed as text here; Option::set checks the values.
    CLI::Option* declared = app.add_option(option.flag_, CLI::callback_t{}, help)
                                ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
                                ->option_text(option.help_suffix())
                                ->group(option.group_);
    if (option.several_) return declared->expected(1, -1)->allow_extra_args();
    return declared->expected(option.optional_ ? 0 : 1, 1)->allow_extra_args(false);
  }

  // The full name of a command, such as "twell bench decode".
  std::string path(const Level& level) const {
    std::string names;
    for (const CLI::App* app = level.app; app->get_parent() != nullptr; app = app->get_parent()) {
      names = " " + app->get_name() + names;
    }
    return levels_.front().command->name_ + names;
  }

  void refuse_unknown_words(const Level& level) const {
    const std::vector<std::string> words = level.app->remaining();
    if (words.empty()) return;
    const std::string& word = words.front();
    std::vector<std::string> names;
    if (word.starts_with('-')) {
      names = {"--help"};
      for (const auto& option : level.command->options_) {
        for (const std::string& flag : {option->flag_, option->negated_}) {
          if (flag.starts_with("--")) names.push_back(flag);
        }
      }
      const std::string flag = word.substr(0, word.find('='));
      throw InputError(fmt::format(
          "unknown option {}{}", flag,
          did_you_mean(flag, names, fmt::format("; '{} --help' lists them", path(level)))));
    }
    TWELL_REQUIRE(!level.command->commands_.empty(),
                  "unexpected word '{}' behind '{}'; '{} --help' lists its options", word,
                  path(level), path(level));
    for (const auto& below : level.command->commands_) names.push_back(below->name_);
    throw InputError(fmt::format(
        "unknown command '{}'{}", word,
        did_you_mean(word, names, fmt::format("; '{} --help' lists the commands", path(level)))));
  }

  void set_options(const Level& level) const {
    const auto& warn = levels_.front().command->warn_;
    for (const auto& [read, option] : level.options) {
      std::vector<std::string> values = read->results();
      if (values.empty()) continue;
      if (values.size() > 1 && !option->collects()) {
        if (!option->is_flag() && warn) {
          warn(fmt::format("{} was given twice; the last one, {}, is used", option->flag_,
                           values.back()));
        }
        values = {values.back()};
      }
      option->set(std::move(values));
    }
    if (!level.command->config_.empty()) apply_config_file(*level.command, level.command->config_);
  }

  static void check_options(const Command& command) {
    for (const auto& option : command.options_) {
      const std::string& flag = option->flag_.empty() ? option->negated_ : option->flag_;
      TWELL_REQUIRE(option->given() || !option->required_, "{} is required: {}", flag,
                    option->help_);
      if (!option->given()) continue;
      for (const Option* other : option->needs_) {
        TWELL_REQUIRE(other->given(), "{} needs {}", flag, other->flag_);
      }
      for (const Option* other : option->excludes_) {
        TWELL_REQUIRE(!other->given(), "{} cannot be combined with {}", flag, other->flag_);
      }
    }
  }

  CLI::App app_;
  std::vector<Level> levels_;
};

int run_command_line(Command& root, int argc, char** argv) { return Parser(root).run(argc, argv); }

}  // namespace twell::cli
