// SPDX-License-Identifier: Apache-2.0
// Text that fits the terminal: cut lines, wrapped paragraphs, tables. Widths are in terminal
// columns, one per code point.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

namespace twell::cli {

// Width of the terminal behind the stream; `otherwise` when it is a pipe or a file.
size_t terminal_columns(std::FILE* stream, size_t otherwise);

// The part of the line that fits into `columns`; a cut line ends in "..".
std::string cut_to_width(std::string_view line, size_t columns);

// Breaks text between words into lines of at most `columns`. The first line begins at column
// `start`, the others are indented by `indent`.
std::string wrapped(std::string_view text, size_t start, size_t indent, size_t columns);

// Prints lines of text to stdout, with a line feed at the end: wrapped at the terminal's
// width, at most 100 columns, or at 80 in a pipe.
void print_paragraphs(std::string_view text);

struct Column {
  std::string header;
  size_t width = 0;   // a longer cell pushes its line; the header may be longer too
  bool left = false;  // text, aligned left; numbers are aligned right
  int extra =
      0;  // 0: always shown; on a narrow terminal the columns of the highest number go first
};

// Prints a table to stdout row by row. Terminals get the columns that fit; pipes and files get all.
class Table {
 public:
  explicit Table(std::vector<Column> columns);
  Table(std::vector<Column> columns, size_t terminal);  // as for a terminal of that width

  void print_header() const;
  // One cell per column, those that are not shown included; missing cells at the end are empty.
  void print_row(const std::vector<std::string>& cells) const;
  // Names the columns that were left out, if any.
  void print_left_out() const;

  std::string header() const;
  std::string row(const std::vector<std::string>& cells) const;  // without a line feed
  std::string left_out() const;                                  // empty when all are shown

 private:
  std::vector<Column> columns_;
  std::vector<bool> shown_;
  size_t terminal_;
};

}  // namespace twell::cli
