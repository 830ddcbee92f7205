// SPDX-License-Identifier: Apache-2.0
#include "cli/progress_line.h"

#include <unistd.h>

#include "cli/process.h"
#include "cli/text_layout.h"

namespace twell::cli {
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
    put("\r" + cut_to_width(line, terminal_columns(stream_, 80) - 1) + "\x1b[K");
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
