// SPDX-License-Identifier: Apache-2.0
// Progress on stdout, or on stderr where stdout carries results. A terminal shows one live line,
// cut to its width; other outputs get a line every few seconds. Write errors are ignored, so that a
// run outlives the reader of its output. Without a stream nothing is shown.
#pragma once

#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <string_view>

#include "twell/base/log.h"

namespace twell::cli {

class ProgressLine {
 public:
  // Without a terminal, at most a line in `interval_seconds`.
  explicit ProgressLine(double interval_seconds, std::FILE* stream = stdout);
  ~ProgressLine() { finish(); }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  // `important`: print the line even if the last plain line was printed a moment ago.
  void update(std::string_view line, bool important = false);
  // The same for a line that is made for a number of columns.
  void update(const std::function<std::string(size_t columns)>& line, bool important = false);
  void finish();  // ends the live line
  void clear();   // erases the live line
  // Prints a permanent line above the live one.
  void print(std::string_view line);
  // Logs info to the progress stream, warnings to stderr.
  LogSink log_sink();

 private:
  void put(std::string_view text) const;
  std::FILE* stream_;
  bool terminal_;
  std::chrono::duration<double> interval_;
  std::chrono::steady_clock::time_point next_{};
  bool live_ = false;  // the cursor is at the beginning of a live line
  std::string line_;   // the live line
};

}  // namespace twell::cli
