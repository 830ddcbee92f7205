// SPDX-License-Identifier: Apache-2.0
// The twell command. Every failure ends here as one line on stderr and an exit code.
#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "twell/base/error.h"

namespace twell::cli {
namespace {

constexpr const char* kFooter = R"(Run 'twell COMMAND --help' for the options of a command.

Exit codes: 0 success, 1 internal error, 2 unusable input (options, files, data),
130 interrupted by SIGINT or SIGTERM.

Examples:
  twell train --data docs/ --out runs/first --preset tiny
  twell tokenize --data docs/ --out shards/ --vocab-size 8192)";

// Names of flags as they are typed: CLI11 writes a negated one as --no-gated{false}.
class HelpFormatter : public CLI::Formatter {
  std::string make_option_name(const CLI::Option* option, bool positional) const override {
    constexpr std::string_view kNegated = "{false}";
    std::string name = CLI::Formatter::make_option_name(option, positional);
    for (size_t at; (at = name.find(kNegated)) != std::string::npos;) {
      name.erase(at, kNegated.size());
    }
    return name;
  }
};

int fail(int code, std::string message) {
  // One line, whatever a file name or a broken file put into it.
  std::replace_if(
      message.begin(), message.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
  fmt::print(stderr, "twell: error: {}\n", message);
  return code;
}

int run(int argc, char** argv) {
  CLI::App app("TwELL: trains and runs language models whose feed-forward layers are sparse.",
               "twell");
  app.set_version_flag("--version", TWELL_VERSION, "Print the version and exit");
  app.set_help_flag("-h,--help", "Print this help and exit");
  app.formatter(std::make_shared<HelpFormatter>());
  app.get_formatter()->column_width(36);
  app.get_formatter()->label("SUBCOMMAND", "COMMAND");
  app.require_subcommand(1);

  CommonOptions common;
  add_train_command(app, common);
  add_generate_command(app, common);
  add_eval_command(app, common);
  add_inspect_command(app, common);
  add_bench_command(app, common);
  add_report_command(app, common);
  add_convert_command(app, common);
  add_tokenize_command(app, common);
  add_doctor_command(app, common);
  app.footer(kFooter);  // after the commands, which would inherit it

  try {
    app.parse(argc, argv);
    return common.run();
  } catch (const CLI::Success& request) {  // --help, --version
    return app.exit(request);
  } catch (const CLI::RequiredError& error) {
    if (!app.get_subcommands().empty()) return fail(kExitInput, error.what());
    const std::vector<std::string> words = app.remaining();
    return fail(kExitInput, words.empty() ? "no command given; 'twell --help' lists them"
                                          : fmt::format("unknown command '{}'; 'twell --help' "
                                                        "lists the commands",
                                                        words.front()));
  } catch (const CLI::Error& error) {
    return fail(kExitInput, error.what());
  } catch (const InputError& error) {
    return fail(kExitInput, error.what());
  } catch (const std::bad_alloc&) {
    return fail(kExitFailure, "out of memory");
  } catch (const std::exception& error) {
    return fail(kExitFailure, error.what());
  }
}

}  // namespace
}  // namespace twell::cli

int main(int argc, char** argv) { return twell::cli::run(argc, argv); }
