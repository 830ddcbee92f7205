// SPDX-License-Identifier: Apache-2.0
#include "cli/text_layout.h"

#include <fmt/core.h>
#include <fmt/ranges.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <limits>

namespace twell::cli {
namespace {

constexpr size_t kGap = 2;  // spaces between the columns of a table
constexpr size_t kUnlimited = std::numeric_limits<size_t>::max();

bool starts_code_point(char c) { return (c & 0xc0) != 0x80; }

size_t columns_of(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), starts_code_point));
}

}  // namespace

size_t terminal_columns(std::FILE* stream, size_t otherwise) {
  constexpr size_t kUsual = 80;  // terminals that do not tell
  winsize size{};
  if (::ioctl(::fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return ::isatty(::fileno(stream)) != 0 ? kUsual : otherwise;
}

std::string cut_to_width(std::string_view line, size_t columns) {
  constexpr std::string_view kCut = "..";
  if (columns_of(line) <= columns) return std::string(line);
  const size_t kept = columns - std::min(columns, kCut.size());
  size_t bytes = 0;
  for (size_t seen = 0; bytes < line.size(); ++bytes) {
    if (starts_code_point(line[bytes]) && seen++ == kept) break;
  }
  return std::string(line.substr(0, bytes)).append(kCut.substr(0, columns));
}

std::string wrapped(std::string_view text, size_t start, size_t indent, size_t columns) {
  std::string lines;
  size_t column = start;
  for (bool first = true; !text.empty(); first = false) {
    const size_t end = std::min(text.find(' '), text.size());
    const std::string_view word = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (!first && columns - std::min(column, columns) < 1 + columns_of(word)) {
      lines.append("\n").append(indent, ' ');
      column = indent;
    } else if (!first) {
      lines += ' ';
      ++column;
    }
    lines += word;
    column += columns_of(word);
  }
  return lines;
}

void print_paragraphs(std::string_view text) {
  constexpr size_t kReadable = 100;
  const size_t columns = std::min(terminal_columns(stdout, 80), kReadable);
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    fmt::print("{}\n", wrapped(text.substr(0, end), 0, 0, columns));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

Table::Table(std::vector<Column> columns)
    : Table(std::move(columns), terminal_columns(stdout, kUnlimited)) {}

Table::Table(std::vector<Column> columns, size_t terminal)
    : columns_(std::move(columns)), shown_(columns_.size(), true), terminal_(terminal) {
  const auto width = [this] {
    size_t sum = 0;
    for (size_t i = 0; i < columns_.size(); ++i) sum += shown_[i] ? columns_[i].width + kGap : 0;
    return sum - std::min(sum, kGap);
  };
  int most = 0;
  for (Column& column : columns_) {
    column.width = std::max(column.width, columns_of(column.header));
    most = std::max(most, column.extra);
  }
  for (int extra = most; extra > 0 && width() > terminal_; --extra) {
    for (size_t i = 0; i < columns_.size(); ++i) {
      if (columns_[i].extra == extra) shown_[i] = false;
    }
  }
}

std::string Table::header() const {
  std::vector<std::string> names;
  for (const Column& column : columns_) names.push_back(column.header);
  return row(names);
}

std::string Table::row(const std::vector<std::string>& cells) const {
  std::string line;
  size_t begin = 0;
  for (size_t i = 0; i < columns_.size(); ++i) {
    if (!shown_[i]) continue;
    const Column& column = columns_[i];
    const std::string cell = i < cells.size() ? cells[i] : "";
    const std::string spaces(column.width - std::min(column.width, columns_of(cell)), ' ');
    if (begin > 0) line.append(kGap, ' ');
    // Only a text in the last column can be longer than the rest of the line.
    const bool wraps = column.left && i + 1 == columns_.size();
    line += wraps         ? wrapped(cell, begin, begin, terminal_)
            : column.left ? cell + spaces
                          : spaces + cell;
    begin += column.width + kGap;
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

std::string Table::left_out() const {
  std::vector<std::string> names;
  for (size_t i = 0; i < columns_.size(); ++i) {
    if (!shown_[i]) names.push_back(columns_[i].header);
  }
  if (names.empty()) return {};
  return fmt::format("Wider terminals and pipes also get: {}.", fmt::join(names, ", "));
}

void Table::print_header() const { fmt::print("{}\n", header()); }

void Table::print_row(const std::vector<std::string>& cells) const {
  fmt::print("{}\n", row(cells));
}

void Table::print_left_out() const {
  if (const std::string text = left_out(); !text.empty()) print_paragraphs(text);
}

}  // namespace twell::cli
