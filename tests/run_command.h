// SPDX-License-Identifier: Apache-2.0
// The built command as a user runs it, in a folder.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace twell {

inline std::string slurp(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

struct CommandResult {
  int code = -1;  // exit code; 128 + signal when one ended it
  std::string out, err;
};

// Its output goes to the files stdout and stderr of the folder, which is also where it runs; its
// input is the file stdin there, or nothing.
inline pid_t start_command(const std::filesystem::path& folder,
                           const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {TWELL_BINARY};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const std::filesystem::path out = folder / "stdout", err = folder / "stderr";
  std::filesystem::path in = folder / "stdin";
  if (!std::filesystem::exists(in)) in = "/dev/null";
  const pid_t child = ::fork();
  if (child == 0) {
    if (::chdir(folder.c_str()) != 0 || std::freopen(in.c_str(), "r", stdin) == nullptr ||
        std::freopen(out.c_str(), "w", stdout) == nullptr ||
        std::freopen(err.c_str(), "w", stderr) == nullptr) {
      ::_exit(126);
    }
    ::execv(TWELL_BINARY, argv.data());
    ::_exit(127);
  }
  return child;
}

inline CommandResult finish_command(const std::filesystem::path& folder, pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
          slurp(folder / "stdout"), slurp(folder / "stderr")};
}

inline CommandResult run_command(const std::filesystem::path& folder,
                                 const std::vector<std::string>& arguments) {
  return finish_command(folder, start_command(folder, arguments));
}

}  // namespace twell
