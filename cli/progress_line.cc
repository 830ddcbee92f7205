// SPDX-License-Identifier: Apache-2.0
#include "cli/progress_line.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>

namespace twell::cli {

ProgressLine::ProgressLine(double plain_interval_seconds, std::FILE* stream)
    : stream_(stream),
      terminal_(::isatty(::fileno(stream)) != 0),
      interval_(plain_interval_seconds) {}

void ProgressLine::finish() {
  if (shown_ == 0) return;
  fmt::print(stream_, "\n");
  std::fflush(stream_);
  shown_ = 0;
}

void ProgressLine::update(std::string_view line, bool important) {
  if (terminal_) {
    fmt::print(stream_, "\r{:<{}}", line, shown_);
    shown_ = line.size();
  } else {
    const auto now = std::chrono::steady_clock::now();
    if (!important && now < next_) return;
    next_ = now + std::chrono::duration_cast<std::chrono::steady_clock::duration>(interval_);
    fmt::print(stream_, "{}\n", line);
  }
  std::fflush(stream_);
}

void ProgressLine::clear() {
  if (shown_ == 0) return;
  fmt::print(stream_, "\r{:<{}}\r", "", shown_);
  shown_ = 0;
}

void ProgressLine::print(std::string_view line) {
  clear();
  fmt::print(stream_, "{}\n", line);
  std::fflush(stream_);
}

LogSink ProgressLine::log_sink() {
  return [this](LogLevel level, std::string_view message) {
    if (level == LogLevel::kInfo) return print(message);
    clear();
    std::fflush(stream_);
    fmt::print(stderr, "twell: warning: {}\n", message);
  };
}

}  // namespace twell::cli
