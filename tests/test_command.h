// SPDX-License-Identifier: Apache-2.0
// Runs the built command in tests as a user runs it, in a folder that is removed afterwards.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "twell/base/test_folder.h"

namespace twell {

// Returns an empty string when the file does not exist.
inline std::string slurp(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

class CommandTest : public testing::Test {
 protected:
  struct Result {
    int code = -1;  // exit code, or 128 + signal number
    std::string out, err;
  };

  static std::string golden(const std::string& part) {
    return TWELL_SOURCE_DIR "/tests/golden/" + part;
  }

  // Runs in the test's folder. Input is the file stdin there, or empty; output goes to the files
  // stdout and stderr there. `out_file`: an open file that receives stdout instead; `in_file`: a
  // terminal that is stdin, and the one whose keys send signals.
  pid_t start(const std::vector<std::string>& arguments, int out_file = -1,
              int in_file = -1) const {
    std::vector<std::string> words = {TWELL_BINARY};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    const std::filesystem::path out = folder_ / "stdout", err = folder_ / "stderr";
    std::filesystem::path in = folder_ / "stdin";
    if (!std::filesystem::exists(in)) in = "/dev/null";
    const pid_t child = ::fork();
    if (child == 0) {
      // The test runner may ignore signals; a child process would inherit that.
      for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) std::signal(signal, SIG_DFL);
      if (::chdir(folder_.c_str()) != 0 || std::freopen(in.c_str(), "r", stdin) == nullptr ||
          std::freopen(out.c_str(), "w", stdout) == nullptr ||
          std::freopen(err.c_str(), "w", stderr) == nullptr) {
        ::_exit(126);
      }
      if (out_file >= 0) ::dup2(out_file, STDOUT_FILENO);
      if (in_file >= 0) {
        ::setsid();
        ::dup2(in_file, STDIN_FILENO);
        ::ioctl(STDIN_FILENO, TIOCSCTTY, 0);
      }
      ::execv(TWELL_BINARY, argv.data());
      ::_exit(127);
    }
    return child;
  }
  Result finish(pid_t child) const {
    int status = 0;
    ::waitpid(child, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
            slurp(folder_ / "stdout"), slurp(folder_ / "stderr")};
  }
  Result run(const std::vector<std::string>& arguments) const { return finish(start(arguments)); }

  // Expects exit code 2 and one line on stderr that names the fault, with no other output except
  // the progress that some commands print before they fail.
  void expect_refused(const std::vector<std::string>& arguments, const std::string& fault) const {
    const Result result = run(arguments);
    EXPECT_EQ(result.code, 2) << fault << "\n" << result.err;
    EXPECT_THAT(result.err, testing::StartsWith("twell: error: "));
    EXPECT_THAT(result.err, testing::HasSubstr(fault));
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    const std::string command = arguments.empty() ? "" : arguments[0];
    if (command != "train" && command != "tokenize") {
      EXPECT_EQ(result.out, "") << fault;
    }
  }

  // Standard output of a command on a terminal of that many columns; expects exit code 0. `keys`:
  // what is typed, each part once the command has written more.
  std::string run_in_terminal(unsigned short columns, const std::vector<std::string>& arguments,
                              const std::vector<std::string>& keys = {}) {
    winsize size{};
    size.ws_col = columns;
    size.ws_row = 24;
    int main_end = -1, terminal = -1;
    EXPECT_EQ(::openpty(&main_end, &terminal, nullptr, nullptr, &size), 0);
    const pid_t child = start(arguments, terminal, keys.empty() ? -1 : terminal);
    ::close(terminal);
    std::string out;
    size_t typed = 0, seen = 0;
    char bytes[4096];
    for (ssize_t count; (count = ::read(main_end, bytes, sizeof(bytes))) > 0;) {
      out.append(bytes, static_cast<size_t>(count));
      // The terminal's echo of what was typed is no answer yet.
      const size_t echoed = typed == 0 ? 0 : keys[typed - 1].size() + 1;
      if (typed == keys.size() || out.size() <= seen + echoed) continue;
      seen = out.size();
      EXPECT_GT(::write(main_end, keys[typed].data(), keys[typed].size()), 0);
      ++typed;
    }
    ::close(main_end);
    EXPECT_EQ(finish(child).code, 0);
    return out;
  }

  std::filesystem::path write(const std::string& name, std::string_view text) const {
    return temp_.write(name, text);
  }

 private:
  const TempFolder temp_;

 protected:
  const std::filesystem::path& folder_ = temp_.path();
};

// Runs of a micro model on the text in the folder `text`.
class RunTest : public CommandTest {
 protected:
  void SetUp() override {
    std::filesystem::create_directory(folder_ / "text");
    for (int i = 0; i < 12; ++i) {
      std::ofstream file(folder_ / "text" / (std::to_string(i) + ".txt"));
      for (int j = 0; j < 200; ++j) {
        file << "note " << j << ": the value of item " << i * j << " is " << j % 7 << "\n";
      }
    }
  }

  // Arguments of a run, followed by `more`.
  static std::vector<std::string> train(const std::string& out,
                                        const std::vector<std::string>& more = {}) {
    std::vector<std::string> words = {"train", "--data",        "text", "--out",
                                      out,     "--width",       "16",   "--ffn",
                                      "48",    "--layers",      "1",    "--heads",
                                      "2",     "--context",     "16",   "--vocab-size",
                                      "300",   "--micro-batch", "2",    "--validation-sequences",
                                      "4",     "--threads",     "1"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  std::string weights(const std::string& run) const {
    return slurp(folder_ / run / "checkpoint" / "model.safetensors");
  }
  // Steps that a run has logged.
  int64_t lines(const std::string& run) const {
    const std::string metrics = slurp(folder_ / run / "metrics.jsonl");
    return std::count(metrics.begin(), metrics.end(), '\n');
  }
  void wait_for_lines(const std::string& run, int64_t count) const {
    for (int i = 0; i < 4000 && lines(run) < count; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
};

}  // namespace twell
