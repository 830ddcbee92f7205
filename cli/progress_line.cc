// SPDX-License-Identifier: Apache-2.0
#include "cli/progress_line.h"

#include <unistd.h>

#include <limits>

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
  // The terminal may have echoed keys into the line.
  if (live_) put("\r" + line_ + "\x1b[K\n");
  live_ = false;
}

void ProgressLine::update(std::string_view line, bool important) {
  update([&](size_t columns) { return cut_to_width(line, columns); }, important);
}

void ProgressLine::update(const std::function<std::string(size_t columns)>& line, bool important) {
  if (terminal_) {
    // Leave one column free, because some terminals scroll on a full line. "\x1b[K" clears the
    // rest. The cursor waits at the line's beginning, where what the terminal echoes, ^C above all,
    // is overwritten by the next line.
    const size_t columns = terminal_columns(stream_, 80) - 1;
    line_ = cut_to_width(line(columns), columns);
    put("\r" + line_ + "\x1b[K\r");
    live_ = true;
    return;
  }
  const auto now = std::chrono::steady_clock::now();
  if (!important && now < next_) return;
  next_ = now + std::chrono::duration_cast<std::chrono::steady_clock::duration>(interval_);
  put(line(std::numeric_limits<size_t>::max()) + "\n");
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
