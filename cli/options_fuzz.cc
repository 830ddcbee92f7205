// SPDX-License-Identifier: Apache-2.0
// A configuration file (JSON when it begins with '{', else TOML) and arguments, all separated by
// NULs: options of every type are set, or there is an InputError. What was set can be written as a
// file that sets the same.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/command_line.h"
#include "cli/config_file.h"
#include "twell/base/error.h"
#include "twell/base/test_folder.h"

namespace twell::cli {
namespace {

struct Values {
  bool flag = false, gated = true;
  int count = 3;
  int64_t size = 8, lengths = 0;
  uint64_t seed = 0;
  std::optional<int64_t> rows;
  double rate = 1.0;
  std::optional<double> decay;
  std::string name = "a", color = "red";
  std::filesystem::path file;
  std::vector<int64_t> batch;
  std::vector<double> rates;
  std::vector<std::string> texts;
};

Command& declare(Command& root, Values& values) {
  Command& command = root.add("run", "Runs.");
  command.flag("--flag", &values.flag, "A flag");
  command.flag("--gated", "--no-gated", &values.gated, "A flag with two spellings");
  command.value("--count", &values.count, "N", "A number").range(1, 1000);
  command.value("--size", &values.size, "N", "A large number").at_least(1);
  command.value("--seed", &values.seed, "N", "A number without sign");
  Option& rows = command.value("--rows", &values.rows, "N", "A number that may be absent");
  command.value("--rate", &values.rate, "X", "A real number").range(0, 1e6);
  command.value("--decay", &values.decay, "X", "A real number that may be absent").excludes(rows);
  command.value("--name", &values.name, "TEXT", "A text").not_in_files();
  command.value("--color", &values.color, "COLOR", "A choice").choices({"red", "green"});
  command.value("--file", &values.file, "FILE", "A path");
  command.value("--batch", &values.batch, "N", "Numbers").several_values();
  command.value("--rates", &values.rates, "X", "Real numbers");
  command.value("--texts", &values.texts, "TEXT", "Texts").value_optional();
  command.config_file();
  command.runs([&values] {
    TWELL_CHECK(values.count >= 1 && values.count <= 1000, "count {}", values.count);
    TWELL_CHECK(values.size >= 1, "size {}", values.size);
    TWELL_CHECK(values.rate >= 0 && values.rate <= 1e6, "rate {}", values.rate);
    TWELL_CHECK(values.color == "red" || values.color == "green", "color {}", values.color);
    return 0;
  });
  return command;
}

// The options that the file sets, as a file; empty when it is refused.
std::string set_by_file(const std::filesystem::path& file) {
  Values values;
  Command root("fuzz", "Fuzzes.");
  Command& command = declare(root, values);
  try {
    apply_config_file(command, file);
  } catch (const InputError&) {
    return {};
  }
  return given_options_json(command, {});
}

void run_with(std::vector<std::string> words) {
  for (const std::string& word : words) {
    // Help and version print.
    if (word.starts_with("--help") || word.starts_with("--version")) return;
    if (word.size() > 1 && word[0] == '-' && word[1] != '-') return;
  }
  Values values;
  Command root("fuzz", "Fuzzes.");
  declare(root, values);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  try {
    run_command_line(root, static_cast<int>(arguments.size()), arguments.data());
  } catch (const InputError&) {
  }
}

void run(std::string_view input) {
  const size_t end = std::min(input.find('\0'), input.size());
  const std::string_view text = input.substr(0, end);
  const TempFolder folder;
  const auto file = folder.write(text.starts_with('{') ? "a.json" : "a.toml", text);
  if (const std::string given = set_by_file(file); !given.empty()) {
    TWELL_CHECK(set_by_file(folder.write("again.json", given)) == given, "not the same: {}", given);
  }
  std::vector<std::string> words = {"fuzz", "run", "--config", file.string()};
  for (size_t begin = end + 1; begin <= input.size() && words.size() < 20;) {
    const size_t next = std::min(input.find('\0', begin), input.size());
    words.emplace_back(input.substr(begin, next - begin));
    begin = next + 1;
  }
  run_with(words);
  words[2] = "--flag";
  words[3] = "--no-gated";
  run_with(words);
}

}  // namespace
}  // namespace twell::cli

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  twell::cli::run({reinterpret_cast<const char*>(data), size});
  return 0;
}
