// SPDX-License-Identifier: Apache-2.0
// Progress on stdout, or on stderr where stdout is for results: one live line on a terminal,
// elsewhere a line every few seconds.
#pragma once

#include <chrono>
#include <cstdio>
#include <string>
#include <string_view>

#include "twell/base/log.h"

namespace twell::cli {

class ProgressLine {
 public:
  explicit ProgressLine(double plain_interval_seconds, std::FILE* stream = stdout);
  ~ProgressLine() { finish(); }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  // `important`: shown even when the last plain line was a moment ago.
  void update(std::string_view line, bool important = false);
  void finish();  // ends a live line
  // A line of its own, above the live one.
  void print(std::string_view line);
  // Info to the stream, warnings to stderr.
  LogSink log_sink();

 private:
  void clear();
  std::FILE* stream_;
  bool terminal_;
  std::chrono::duration<double> interval_;
  std::chrono::steady_clock::time_point next_{};
  size_t shown_ = 0;  // width of the live line
};

}  // namespace twell::cli
