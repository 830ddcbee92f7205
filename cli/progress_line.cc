// SPDX-License-Identifier: Apache-2.0
#include "cli/progress_line.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace twell::cli {

ProgressLine::ProgressLine(double plain_interval_seconds)
    : terminal_(::isatty(STDOUT_FILENO) != 0), interval_(plain_interval_seconds) {}

void ProgressLine::finish() {
  if (shown_ == 0) return;
  fmt::print("\n");
  std::fflush(stdout);
  shown_ = 0;
}

void ProgressLine::update(std::string_view line, bool important) {
  if (terminal_) {
    fmt::print("\r{:<{}}", line, shown_);
    shown_ = line.size();
  } else {
    const auto now = std::chrono::steady_clock::now();
    if (!important && now < next_) return;
    next_ = now + std::chrono::duration_cast<std::chrono::steady_clock::duration>(interval_);
    fmt::print("{}\n", line);
  }
  std::fflush(stdout);
}

void ProgressLine::clear() {
  if (shown_ == 0) return;
  fmt::print("\r{:<{}}\r", "", shown_);
  shown_ = 0;
}

void ProgressLine::print(std::string_view line) {
  clear();
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

LogSink ProgressLine::log_sink() {
  return [this](LogLevel level, std::string_view message) {
    if (level == LogLevel::kInfo) return print(message);
    clear();
    std::fflush(stdout);
    fmt::print(stderr, "twell: warning: {}\n", message);
  };
}

}  // namespace twell::cli
