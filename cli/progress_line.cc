// SPDX-License-Identifier: Apache-2.0
#include "cli/progress_line.h"
#include "cli/process.h"

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>

namespace twell::cli {
namespace {

size_t terminal_columns(std::FILE* stream) {
  constexpr size_t kUsual = 80;
  winsize size{};
  const bool known = ::ioctl(::fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : kUsual;
}

}  // namespace

std::string cut_to_width(std::string_view line, size_t columns) {
  constexpr std::string_view kCut = "..";
  const auto starts_code_point = [](char c) { return (c & 0xc0) != 0x80; };
  const auto width = std::count_if(line.begin(), line.end(), starts_code_point);
  if (static_cast<size_t>(width) <= columns) return std::string(line);
  const size_t kept = columns - std::min(columns, kCut.size());
  size_t bytes = 0;
  for (size_t seen = 0; bytes < line.size(); ++bytes) {
    if (starts_code_point(line[bytes]) && seen++ == kept) break;
  }
  return std::string(line.substr(0, bytes)).append(kCut.substr(0, columns));
}

ProgressLine::ProgressLine(double interval_seconds, std::FILE* stream)
    : stream_(stream),
      terminal_(stream != nullptr && ::isatty(::fileno(stream)) != 0),
      interval_(interval_seconds) {}

void ProgressLine::put(std::string_view text) const {
  if (stream_ == nullptr) return;
  std::fwrite(text.data(), 1, text.size(), stream_);
  std::fflush(stream_);
}

void ProgressLine::finish() {
  if (live_) put("\n");
  live_ = false;
}

void ProgressLine::update(std::string_view line, bool important) {
  if (terminal_) {
    // Leave one column free, because some terminals scroll on a full line. "\x1b[K" clears the
    // rest.
    put("\r" + cut_to_width(line, terminal_columns(stream_) - 1) + "\x1b[K");
    live_ = true;
    return;
  }
  const auto now = std::chrono::steady_clock::now();
  if (!important && now < next_) return;
  next_ = now + std::chrono::duration_cast<std::chrono::steady_clock::duration>(interval_);
  put(std::string(line) + "\n");
}

void ProgressLine::clear() {
  if (live_) put("\r\x1b[K");
  live_ = false;
}

void ProgressLine::print(std::string_view line) {
  clear();
  put(std::string(line) + "\n");
}

LogSink ProgressLine::log_sink() {
  return [this](LogLevel level, std::string_view message) {
    if (level == LogLevel::kInfo) return print(message);
    clear();
    print_error("twell: warning: {}\n", message);
  };
}

}  // namespace twell::cli
