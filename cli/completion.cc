// SPDX-License-Identifier: Apache-2.0
// Shell completion, generated from the declared commands and options, and `twell completion`.
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <memory>

#include "cli/commands.h"
#include "cli/process.h"
#include "twell/base/error.h"

namespace twell::cli {
namespace {

// What the completion scripts need to know about a command.
struct Node {
  std::string path;  // "twell bench ffn"
  std::string help;
  std::vector<std::string> commands;  // names of the subcommands
  struct Choice {
    std::string flag;  // "--steps"
    std::string help;
    bool takes_value, is_path;
    std::vector<std::string> values;  // the allowed values, where they are limited
  };
  std::vector<Choice> options;
};

bool is_path_type(const std::string& type) {
  return type == "DIR" || type == "FILE" || type == "[FILE]" || type == "PATH";
}

// The words that complete a command: its options and subcommands.
std::string words_of(const Node& node) {
  std::vector<std::string> words = node.commands;
  for (const Node::Choice& option : node.options) words.push_back(option.flag);
  words.push_back("--help");
  return fmt::format("{}", fmt::join(words, " "));
}

// bash and zsh: find the command on the line, then complete an option's value or else the words.
// The two shells differ in how they access the line and return candidates.
struct Dialect {
  const char* head;
  const char* words;  // returns words
  const char* files;  // returns files and folders
  const char* tail;
};

constexpr Dialect kBash = {
    R"(_twell() {
  local at=twell word
  local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
)",
    "COMPREPLY=($(compgen -W '{}' -- \"$current\"))", "COMPREPLY=($(compgen -f -- \"$current\"))",
    R"(}
complete -o filenames -F _twell twell
)"};

constexpr Dialect kZsh = {
    R"(#compdef twell
_twell() {
  local at=twell word previous="$words[CURRENT-1]"
  for word in "${(@)words[2,CURRENT-1]}"; do
)",
    "compadd -- {}", "_files",
    R"(}
compdef _twell twell
)"};

std::string in_dialect(const std::vector<Node>& nodes, const Dialect& dialect) {
  std::vector<std::string> paths;
  for (const Node& node : nodes) paths.push_back(fmt::format("\"{}\"", node.path));
  std::string script = dialect.head;
  script +=
      fmt::format("    case \"$at $word\" in\n      {}) at=\"$at $word\";;\n    esac\n  done\n",
                  fmt::join(paths.begin() + 1, paths.end(), "|"));
  script += "  case \"$at:$previous\" in\n";
  for (const Node& node : nodes) {
    for (const Node::Choice& option : node.options) {
      if (!option.takes_value) continue;
      std::string answer;
      if (!option.values.empty()) {
        answer = fmt::format(fmt::runtime(dialect.words), fmt::join(option.values, " ")) + "; ";
      } else if (option.is_path) {
        answer = std::string(dialect.files) + "; ";
      }
      script += fmt::format("    \"{}:{}\") {}return;;\n", node.path, option.flag, answer);
    }
  }
  script += "  esac\n  case \"$at\" in\n";
  for (const Node& node : nodes) {
    script += fmt::format("    \"{}\") {};;\n", node.path,
                          fmt::format(fmt::runtime(dialect.words), words_of(node)));
  }
  return script + "  esac\n" + dialect.tail;
}

std::string quoted_for_fish(const std::string& text) {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\'' || c == '\\') out += '\\';
    out += c;
  }
  return out + "'";
}

// A condition that is true when the words of the line name this command.
std::string fish_condition(const Node& node, const std::vector<Node>& nodes) {
  if (node.path.find(' ') == std::string::npos) return "__fish_use_subcommand";
  std::string condition;
  std::string left = node.path.substr(node.path.find(' ') + 1);
  const bool nested = left.find(' ') != std::string::npos;
  for (size_t end; !left.empty(); left = end == std::string::npos ? "" : left.substr(end + 1)) {
    end = left.find(' ');
    condition += condition.empty() ? "" : "; and ";
    condition += "__fish_seen_subcommand_from " + left.substr(0, end);
  }
  for (const Node& other : nodes) {  // a name can occur at two levels: `train` and `bench train`
    const std::string name = other.path.substr(other.path.rfind(' ') + 1);
    if (!nested && !other.commands.empty() && other.path.find(' ') != std::string::npos &&
        other.path != node.path) {
      condition += "; and not __fish_seen_subcommand_from " + name;
    }
  }
  return condition;
}

std::string for_fish(const std::vector<Node>& nodes) {
  std::string script = "complete -c twell -f\n";
  const auto help_of = [&](const std::string& path) {
    for (const Node& node : nodes) {
      if (node.path == path) return node.help;
    }
    return std::string();
  };
  for (const Node& node : nodes) {
    const std::string condition = quoted_for_fish(fish_condition(node, nodes));
    for (const std::string& command : node.commands) {
      script += fmt::format("complete -c twell -n {} -a {} -d {}\n", condition, command,
                            quoted_for_fish(help_of(node.path + " " + command)));
    }
    for (const Node::Choice& option : node.options) {
      std::string value;
      if (!option.values.empty()) {
        value = fmt::format(" -x -a '{}'", fmt::join(option.values, " "));
      } else if (option.is_path) {
        value = " -r -F";
      } else if (option.takes_value) {
        value = " -x";
      }
      script += fmt::format("complete -c twell -n {} -l {}{} -d {}\n", condition,
                            option.flag.substr(2), value, quoted_for_fish(option.help));
    }
  }
  return script;
}

}  // namespace

std::string completion_script(const Command& root, std::string_view shell) {
  std::vector<Node> nodes;
  const auto visit = [&](const Command& command, const std::string& path,
                         const auto& self) -> void {
    Node& node = nodes.emplace_back(Node{path, command.description(), {}, {}});
    for (const auto& below : command.commands()) node.commands.push_back(below->name());
    for (const auto& option : command.options()) {
      for (const std::string& flag : {option->flag(), option->negated()}) {
        if (!flag.starts_with("--")) continue;
        node.options.push_back({flag, option->help(), !option->is_flag(),
                                is_path_type(option->type()), option->proposals()});
      }
    }
    for (const auto& below : command.commands()) self(*below, path + " " + below->name(), self);
  };
  visit(root, root.name(), visit);
  if (shell == "bash") return in_dialect(nodes, kBash);
  if (shell == "zsh") return in_dialect(nodes, kZsh);
  TWELL_REQUIRE(shell == "fish", "unknown shell '{}'; use bash, zsh or fish", shell);
  return for_fish(nodes);
}

void add_completion_command(Command& root) {
  auto shell = std::make_shared<std::string>();
  Command& command = root.add("completion", "Print a script that completes commands in a shell");
  command.runs([&root, shell] {
    write_out(completion_script(root, *shell));
    return kExitOk;
  });
  command.word("SHELL", shell.get(), "bash, zsh or fish").choices({"bash", "zsh", "fish"});
  command.footer(
      "Examples:\n  source <(twell completion bash)\n"
      "  twell completion zsh > ~/.zfunc/_twell\n"
      "  twell completion fish > ~/.config/fish/completions/twell.fish");
}

}  // namespace twell::cli
