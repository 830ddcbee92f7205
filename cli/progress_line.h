// SPDX-License-Identifier: Apache-2.0
// Progress on stdout, or on stderr where stdout is for results: on a terminal one live line, cut to
// the terminal's width, elsewhere a line every few seconds. Progress that cannot be written is lost
// without an error, so that a run outlives the reader of its output.
#pragma once

#include <chrono>
#include <cstdio>
#include <string>
#include <string_view>

#include "twell/base/log.h"

namespace twell::cli {

// As much of the line as `columns` hold; a cut line ends in "..". Every code point is a column.
std::string cut_to_width(std::string_view line, size_t columns);

class ProgressLine {
 public:
  explicit ProgressLine(double plain_interval_seconds, std::FILE* stream = stdout);
  ~ProgressLine() { finish(); }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  // `important`: shown even when the last plain line was a moment ago.
  void update(std::string_view line, bool important = false);
  void finish();  // ends a live line
  void clear();   // takes a live line away
  // A line of its own, above the live one.
  void print(std::string_view line);
  // Info to the stream, warnings to stderr.
  LogSink log_sink();

 private:
  void put(std::string_view text) const;
  std::FILE* stream_;
  bool terminal_;
  std::chrono::duration<double> interval_;
  std::chrono::steady_clock::time_point next_{};
  bool live_ = false;  // the cursor is on a live line
};

}  // namespace twell::cli
