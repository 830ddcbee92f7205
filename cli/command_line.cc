// SPDX-License-Identifier: Apache-2.0
#include "cli/command_line.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <map>
#include <numeric>
#include <utility>

#include "cli/config_file.h"
#include "cli/text_layout.h"
#include "twell/base/error.h"

namespace twell::cli {
namespace {

// Columns of the help, and the one where descriptions begin.
constexpr size_t kHelpWidth = 80;
constexpr size_t kHelpColumn = 30;

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

// "; did you mean NAME?" when the word is the beginning of a name, or begins with one, or is within
// a small edit distance of one, else `otherwise`.
std::string did_you_mean(const std::string& word, const std::vector<std::string>& names,
                         const std::string& otherwise) {
  const std::string* best = nullptr;
  size_t least = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string& name : names) {
    const bool begins = word.size() > 2 && !word.ends_with('-') &&
                        (name.starts_with(word) || word.starts_with(name));
    const size_t distance = begins ? 1 : edit_distance(word, name);
    if (distance < least) {
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

// A line of the help: names, and their description in the second column.
std::string help_line(const std::string& names, const std::string& description) {
  std::string text = "  " + names;
  if (description.empty()) return text + "\n";
  text += text.size() < kHelpColumn ? std::string(kHelpColumn - text.size(), ' ')
                                    : "\n" + std::string(kHelpColumn, ' ');
  return text + wrapped(description, kHelpColumn, kHelpColumn, kHelpWidth) + "\n";
}

}  // namespace

Command::Command(std::string name, std::string description)
    : name_(std::move(name)), description_(std::move(description)) {}

Option& Command::add(Option option) {
  options_.push_back(std::make_unique<Option>(std::move(option)));
  return *options_.back();
}

Option& Command::value(std::string flag, OptionTarget target, std::string type, std::string help) {
  return add({std::move(flag), "", target, std::move(type), std::move(help), group_});
}

Option& Command::choice(std::string flag, OptionTarget target, std::vector<std::string> values,
                        std::string help) {
  return value(std::move(flag), target, fmt::format("{}", fmt::join(values, "|")), std::move(help))
      .choices(std::move(values));
}

Option& Command::flag(std::string flag, OptionTarget target, std::string help) {
  return this->flag(std::move(flag), "", target, std::move(help));
}

Option& Command::flag(std::string flag, std::string negated, OptionTarget target,
                      std::string help) {
  return add({std::move(flag), std::move(negated), target, "", std::move(help), group_});
}

Option& Command::word(std::string name, OptionTarget target, std::string help) {
  return value(std::move(name), target, "", std::move(help)).required();
}

void Command::config_file() {
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
    for (const std::string* flag : {&option->flag(), &option->negated()}) {
      if (!flag->starts_with("--") || flag->substr(2) != name) continue;
      if (negated != nullptr) *negated = flag == &option->negated();
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

std::string Command::help(const std::string& path) const {
  std::string text = description_ + "\n\nUsage: " + path;
  std::string words;
  for (const auto& option : options_) {
    if (!option->is_word()) continue;
    text += " " + option->flag();
    words += help_line(option->help_names(), option->help_text());
  }
  text += " [OPTIONS]";
  if (!commands_.empty()) text += " COMMAND";
  text += "\n";
  if (!words.empty()) text += "\nWords:\n" + words;
  const bool root = path == name_;
  std::vector<std::string> groups = {"Options"};
  for (const auto& option : options_) {
    if (std::find(groups.begin(), groups.end(), option->group()) == groups.end()) {
      groups.push_back(option->group());
    }
  }
  for (const std::string& group : groups) {
    text += "\n" + group + ":\n";
    if (group == "Options") {
      text += help_line("-h,--help", "Print this help and exit");
      if (root) text += help_line("-V,--version", "Print the version and exit");
    }
    for (const auto& option : options_) {
      if (option->group() != group || option->is_word()) continue;
      text += help_line(option->help_names(), option->help_text());
    }
  }
  if (!commands_.empty()) text += "\nCommands:\n";
  for (const auto& command : commands_) text += help_line(command->name_, command->description_);
  if (footer_.empty()) return text;
  const size_t begin = footer_.find_first_not_of('\n');
  return text + "\n" + refilled(std::string_view(footer_).substr(begin)) + "\n";
}

// One pass over the words of a command line. Options are set at its end, so that --help is answered
// whatever stands around it, and faults are reported in the order of the words.
class Parser {
 public:
  Parser(Command& root, int argc, char** argv)
      : root_(root),
        command_(&root),
        path_(root.name_),
        words_(argv + std::min(argc, 1), argv + argc) {}

  int run() {
    while (at_ < words_.size()) {
      const std::string word = words_[at_++];
      if (only_words_ || word == "-" || !word.starts_with('-') || is_number(word)) {
        take_word(word);
      } else if (word == "--") {
        only_words_ = true;
      } else if (word == "-h" || word == "--help") {
        fmt::print("{}", command_->help(path_));
        return 0;
      } else if (command_ == &root_ && (word == "-V" || word == "--version")) {
        fmt::print("{}\n", TWELL_VERSION);
        return 0;
      } else {
        take_option(word);
      }
    }
    if (fault_) throw InputError(*fault_);
    TWELL_REQUIRE(command_->run_, "no command given; '{} --help' lists them", path_);
    set_options();
    for (const auto& option : command_->options_) option->check_others();
    if (root_.prepare_) root_.prepare_();
    return command_->run_();
  }

 private:
  struct Found {
    std::vector<std::string> values;
    bool negated = false;
    int times = 0;
  };

  static bool is_number(const std::string& word) {
    return word.size() > 1 && word[0] == '-' && (std::isdigit(word[1]) != 0 || word[1] == '.');
  }

  void refuse(std::string text) {
    if (!fault_) fault_ = std::move(text);
  }

  // A command, or a positional word.
  void take_word(const std::string& word) {
    if (!only_words_) {
      for (const auto& below : command_->commands_) {
        if (below->name_ != word) continue;
        command_ = below.get();
        path_ += " " + word;
        return;
      }
    }
    for (const auto& option : command_->options_) {
      if (!option->is_word() || found_.contains(option.get())) continue;
      found_[option.get()] = {.values = {word}, .times = 1};
      return;
    }
    if (command_->commands_.empty()) {
      return refuse(fmt::format("unexpected word '{}' behind '{}'; '{} --help' lists its options",
                                word, path_, path_));
    }
    std::vector<std::string> names;
    for (const auto& below : command_->commands_) names.push_back(below->name_);
    refuse(fmt::format(
        "unknown command '{}'{}", word,
        did_you_mean(word, names, fmt::format("; the commands are {}", fmt::join(names, ", ")))));
    at_ = std::find_if(words_.begin() + static_cast<int64_t>(at_), words_.end(), is_help) -
          words_.begin();
  }

  static bool is_help(const std::string& word) { return word == "-h" || word == "--help"; }

  void take_option(const std::string& word) {
    const size_t equals = word.find('=');
    const std::string flag = word.substr(0, equals);
    bool negated = false;
    Option* const option =
        flag.starts_with("--") ? command_->find(flag.substr(2), &negated) : nullptr;
    if (option == nullptr) return refuse_option(flag);
    Found& found = found_[option];
    ++found.times;
    found.negated = negated;
    if (!option->collects() || option->is_flag()) found.values.clear();
    if (equals != std::string::npos) {
      found.values.push_back(word.substr(equals + 1));
    } else if (option->is_flag()) {
      found.values.emplace_back("true");
    } else {
      // What follows is the value, even where it looks like an option, unless it may be omitted.
      const bool omitted =
          at_ == words_.size() || (option->is_value_optional() && is_option(words_[at_]));
      if (!omitted) found.values.push_back(words_[at_++]);
      if (omitted && !option->is_value_optional()) refuse(flag + " needs a value");
    }
    while (option->takes_several() && at_ < words_.size() && !is_option(words_[at_])) {
      found.values.push_back(words_[at_++]);
    }
  }

  static bool is_option(const std::string& word) {
    return word.size() > 1 && word.starts_with('-') && !is_number(word);
  }

  void refuse_option(const std::string& flag) {
    std::vector<std::string> names = {"--help"};
    for (const auto& option : command_->options_) {
      for (const std::string& known : {option->flag(), option->negated()}) {
        if (known.starts_with("--")) names.push_back(known);
      }
    }
    refuse(fmt::format("unknown option {}{}", flag,
                       did_you_mean(flag, names, fmt::format("; '{} --help' lists them", path_))));
  }

  void set_options() {
    for (const auto& option : command_->options_) {
      const auto found = found_.find(option.get());
      if (found == found_.end()) continue;
      Found& given = found->second;
      if (given.times > 1 && !option->collects() && !option->is_flag() && root_.warn_) {
        root_.warn_(fmt::format("{} was given twice; the last one, {}, is used", option->flag(),
                                given.values.empty() ? "" : given.values.back()));
      }
      option->set(std::move(given.values), given.negated);
    }
    if (!command_->config_.empty()) apply_config_file(*command_, command_->config_);
  }

  Command& root_;
  Command* command_;
  std::string path_;
  std::vector<std::string> words_;
  size_t at_ = 0;
  bool only_words_ = false;
  std::map<const Option*, Found> found_;
  std::optional<std::string> fault_;
};

int run_command_line(Command& root, int argc, char** argv) {
  return Parser(root, argc, argv).run();
}

}  // namespace twell::cli
