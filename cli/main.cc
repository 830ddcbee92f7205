// SPDX-License-Identifier: Apache-2.0
// The twell command. Every failure is reported here as one line on stderr and an exit code.
#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <new>
#include <string>
#include <system_error>

#include "cli/commands.h"
#include "cli/process.h"
#include "cli/ranks.h"
#include "twell/base/error.h"

namespace twell::cli {
namespace {

constexpr const char* kRootFooter = R"(Run 'twell COMMAND --help' for the options of a command.

Exit codes: 0 success, 1 internal error or lost output, 2 unusable input (options, files, data),
130, 143, 129 ended by SIGINT, SIGTERM, SIGHUP; 'train' with --gpus or --ranks: 130 for each.

Examples:
  twell train --data docs/ --out runs/first --preset tiny
  twell tokenize --data docs/ --out shards/ --vocab-size 8192)";

int fail(int code, std::string message) {
  // Keep the message on one line, whatever a file name or a broken file contains.
  std::replace_if(
      message.begin(), message.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
  if (prints_error()) print_error("twell: error: {}\n", message);
  return code;
}

int run(int argc, char** argv) {
  open_standard_descriptors();
  handle_signals();
  Command root("twell",
               "TwELL: trains and runs language models whose feed-forward layers are sparse.");
  CommonOptions common;
  add_train_command(root, common);
  add_generate_command(root, common);
  add_serve_command(root, common);
  add_eval_command(root, common);
  add_inspect_command(root, common);
  add_bench_command(root, common);
  add_report_command(root, common);
  add_convert_command(root, common);
  add_tokenize_command(root, common);
  add_doctor_command(root);
  add_dump_command(root, common);
  add_completion_command(root);
  root.footer(kRootFooter);
  root.before_running([&common] { resolve_inputs(common); });
  root.on_warning([](const std::string& text) {
    // The launcher of ranks has printed it.
    if (!started_by_launch_ranks()) print_error("twell: warning: {}\n", text);
  });
  try {
    return close_output(run_command_line(root, argc, argv));
  } catch (const Interrupted&) {
    return interrupted_exit_code();
  } catch (const std::filesystem::filesystem_error& error) {
    return fail(kExitInput,
                fmt::format("cannot use {}: {}", error.path1().string(), error.code().message()));
  } catch (const std::system_error& error) {
    if (std::ferror(stdout) != 0) return close_output(kExitFailure, error.code().value());
    return fail(kExitFailure, error.what());
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
