// SPDX-License-Identifier: Apache-2.0
#include "twell/data/text_documents.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/json.h"
#include "twell/base/utf8.h"

namespace twell {
namespace fs = std::filesystem;
using nlohmann::json;
namespace {

constexpr size_t kProbeBytes = 8192;  // leading bytes that tell text from binary
constexpr int kMaxDepth = 1000;       // of a row's JSON, whose other fields are not kept

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

bool is_control(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return (byte < 0x20 && !is_space(c) && c != '\b' && c != '\x1b') || byte == 0x7F;
}

// The unread part of a file's text. It grows at its end by chunks and is consumed from its start.
class StreamBuffer {
 public:
  StreamBuffer(const fs::path& path, size_t chunk_bytes)
      : path_(path), reader_(path), chunk_bytes_(chunk_bytes) {
    while (view().size() < kProbeBytes && grow()) {
    }
    const std::string_view reason = binary_reason(view().substr(0, kProbeBytes));
    if (!reason.empty()) fail(reason);
    constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
    if (view().starts_with(kByteOrderMark)) consume(kByteOrderMark.size());
  }

  std::string_view view() const { return std::string_view(buffer_).substr(begin_); }
  void consume(size_t count) { begin_ += count; }

  // Position of the delimiter in the next `limit` bytes, reading more as needed. When it returns
  // npos, view() holds at least `limit` bytes or all that is left.
  size_t find(char delimiter, size_t limit) {
    size_t searched = 0;
    do {
      const std::string_view next = view().substr(0, limit);
      const size_t position = next.find(delimiter, searched);
      if (position != std::string_view::npos) return position;
      searched = next.size();
    } while (searched < limit && grow());
    return std::string_view::npos;
  }

  // Throws when the next `size` bytes are not UTF-8.
  void check_utf8(size_t size) const {
    const size_t invalid = find_invalid_utf8(view().substr(0, size));
    if (invalid == size) return;
    fail(fmt::format("invalid UTF-8 at byte {}{}", dropped_ + begin_ + invalid,
                     is_compressed(path_) ? " of the unpacked text" : ""));
  }

  [[noreturn]] void fail(std::string_view reason) const {
    throw InputError(fmt::format("cannot use {} as text: {}", path_.string(), reason));
  }
  int64_t file_bytes_read() const { return reader_.file_bytes_read(); }

 private:
  bool grow() {
    buffer_.erase(0, begin_);
    dropped_ += begin_;
    begin_ = 0;
    const size_t before = buffer_.size();
    buffer_.resize(before + chunk_bytes_);
    const size_t count = reader_.read(std::span(buffer_).subspan(before));
    buffer_.resize(before + count);
    return count > 0;
  }

  fs::path path_;
  ByteReader reader_;
  size_t chunk_bytes_;
  std::string buffer_;
  size_t begin_ = 0;    // start of the unread part in buffer_
  size_t dropped_ = 0;  // bytes of text before buffer_
};

// The documents of a text file, separated by NUL bytes.
class TextDocuments : public DocumentReader {
 public:
  TextDocuments(const fs::path& path, const DocumentOptions& options)
      : stream_(path, options.chunk_bytes), piece_bytes_(options.piece_bytes) {}

  bool next(TextPiece& piece) override {
    for (;;) {
      // The extra byte shows whether the document ends after this piece or continues.
      const size_t end = stream_.find('\0', piece_bytes_ + 1);
      const bool ends = end != std::string_view::npos;
      const std::string_view text = stream_.view().substr(0, ends ? end : piece_bytes_ + 1);
      if (text.empty() && !ends) return false;
      const size_t length = piece_length(text, piece_bytes_);
      stream_.check_utf8(length);
      piece.text.assign(text.substr(0, length));
      piece.begins_document = begins_;
      stream_.consume(length + (ends ? 1 : 0));
      begins_ = ends;
      if (length > 0) return true;
    }
  }

  int64_t file_bytes_read() const override { return stream_.file_bytes_read(); }

 private:
  StreamBuffer stream_;
  size_t piece_bytes_;
  bool begins_ = true;
};

// Documents that are loaded whole into memory before their pieces are returned.
class RowDocuments : public DocumentReader {
 public:
  explicit RowDocuments(const DocumentOptions& options) : options_(options) {}

  bool next(TextPiece& piece) override {
    const bool begins = begin_ == document_.size();
    while (begin_ == document_.size()) {
      begin_ = 0;
      document_.clear();
      if (!read_row()) return false;
    }
    const std::string_view rest = std::string_view(document_).substr(begin_);
    const size_t length = piece_length(rest, options_.piece_bytes);
    piece.text.assign(rest.substr(0, length));
    piece.begins_document = begins;
    piece.line = line_;
    begin_ += length;
    return true;
  }

 protected:
  // Stores the next row's text in document_, which is empty; false at the end.
  virtual bool read_row() = 0;

  // Leaves out the row whose fault is being handled, or throws it again.
  void leave_out(const InputError& fault) {
    if (!options_.on_bad_row) throw;
    document_.clear();
    options_.on_bad_row(fault.what());
  }

  DocumentOptions options_;
  std::string document_;  // text of the current row
  int64_t line_ = 0;      // of the current row, where the file has lines

 private:
  size_t begin_ = 0;  // start of the part not yet returned
};

// One JSON object per line; blank lines are skipped.
class JsonlDocuments : public RowDocuments {
 public:
  JsonlDocuments(const fs::path& path, const DocumentOptions& options)
      : RowDocuments(options), stream_(path, options.chunk_bytes) {}

  int64_t file_bytes_read() const override { return stream_.file_bytes_read(); }

 private:
  bool read_row() override {
    ++line_;
    const size_t newline = stream_.find('\n', options_.max_json_line + 1);
    const bool complete = newline != std::string_view::npos;
    const std::string_view line = stream_.view().substr(0, complete ? newline : std::string::npos);
    if (line.empty() && !complete) return false;
    const bool whole = line.size() <= options_.max_json_line;
    try {
      if (!whole) fail(fmt::format("is longer than {} MiB", options_.max_json_line >> 20));
      stream_.check_utf8(line.size());
      if (!std::all_of(line.begin(), line.end(), is_space)) parse(line);
    } catch (const InputError& fault) {
      leave_out(fault);
    }
    whole ? stream_.consume(line.size() + (complete ? 1 : 0)) : skip_line();
    return true;
  }

  void skip_line() {
    while (!stream_.view().empty()) {
      const size_t newline = stream_.find('\n', options_.chunk_bytes);
      const bool ends = newline != std::string_view::npos;
      stream_.consume(ends ? newline + 1 : std::min(stream_.view().size(), options_.chunk_bytes));
      if (ends) return;
      stream_.find('\n', 1);  // reads on
    }
  }

  void parse(std::string_view line) {
    if (options_.json_field.empty()) {
      document_ = line;
      return;
    }
    json text;
    try {
      text = parse_json_field(line, options_.json_field, fmt::format("line {}", line_),
                              {.depth = kMaxDepth, .keys = JsonKeys::kLast});
    } catch (const InputError& error) {
      stream_.fail(error.what());
    }
    if (!text.is_string()) fail(fmt::format("has no string field \"{}\"", options_.json_field));
    document_.swap(text.get_ref<std::string&>());
  }

  [[noreturn]] void fail(std::string_view reason) const {
    stream_.fail(fmt::format("line {} {}", line_, reason));
  }

  StreamBuffer stream_;
};

class ParquetDocuments : public RowDocuments {
 public:
  ParquetDocuments(const fs::path& path, const DocumentOptions& options)
      : RowDocuments(options), reader_(path, {options.json_field}, options.row_groups) {}

  int64_t file_bytes_read() const override { return reader_.file_bytes_read(); }

 private:
  bool read_row() override {
    if (!reader_.next(row_)) return false;
    json& text = row_[options_.json_field];
    try {
      TWELL_REQUIRE(text.is_string(), "{}: row {} has no text in \"{}\"", reader_.source(),
                    reader_.row(), options_.json_field);
      document_.swap(text.get_ref<std::string&>());
    } catch (const InputError& fault) {
      leave_out(fault);
    }
    return true;
  }

  ParquetReader reader_;
  json row_;
};

}  // namespace

size_t piece_length(std::string_view text, size_t limit) {
  if (text.size() <= limit) return text.size();
  size_t cut = 0;
  int cut_rank = 0;
  // Search only the second half: a piece is then at least half the limit, which bounds total cost.
  size_t newline = text.rfind('\n', limit - 1);
  while (newline != std::string_view::npos && newline > limit / 2 && cut_rank < 3) {
    const bool before_word = !is_space(text[newline + 1]);
    const bool after_word = !is_space(text[newline - 1]);
    const int rank = before_word ? (after_word ? 3 : 2) : 1;
    if (rank > cut_rank) {
      cut = newline + 1;
      cut_rank = rank;
    }
    newline = text.rfind('\n', newline - 1);
  }
  return cut > 0 ? cut : utf8_prefix(text, limit);
}

bool is_tar(std::string_view start) {
  constexpr size_t kHeader = 512, kSum = 148, kSumDigits = 8;
  if (start.size() < kHeader) return false;
  const std::string_view digits = start.substr(kSum, kSumDigits);
  size_t at = digits.find_first_not_of(' ');
  uint32_t expected = 0;
  if (at == digits.npos || digits[at] < '0' || digits[at] > '7') return false;
  for (; at < digits.size() && digits[at] >= '0' && digits[at] <= '7'; ++at) {
    expected = expected * 8 + static_cast<uint32_t>(digits[at] - '0');
  }
  uint32_t sum = 0;  // of the header's bytes, those of the sum taken as spaces
  for (size_t i = 0; i < kHeader; ++i) {
    const bool of_sum = i >= kSum && i < kSum + kSumDigits;
    sum += of_sum ? uint32_t{' '} : static_cast<unsigned char>(start[i]);
  }
  return sum == expected;
}

std::string_view binary_reason(std::string_view start) {
  if (is_lfs_pointer(start)) return kLfsAdvice;
  if (is_tar(start)) return "it is a tar archive; unpack it and give the folder";
  if (start.starts_with("\xFF\xFE") || start.starts_with("\xFE\xFF")) {
    return "it is UTF-16; convert it to UTF-8";
  }
  const auto controls = static_cast<size_t>(std::count_if(start.begin(), start.end(), is_control));
  // The probe may end inside a UTF-8 sequence.
  const bool is_utf8 = find_invalid_utf8(start) + 4 > start.size();
  // NUL separates documents, so some controls are fine; over a third of the bytes means binary.
  const bool mostly_controls = controls >= 32 && controls * 3 > start.size();
  if (mostly_controls || (!is_utf8 && controls > 0)) return "it is a binary file";
  return {};
}

std::unique_ptr<DocumentReader> DocumentReader::open(const fs::path& path,
                                                     const DocumentOptions& options) {
  TWELL_CHECK(options.piece_bytes >= 4 && options.chunk_bytes > 0, "pieces of {}, chunks of {}",
              options.piece_bytes, options.chunk_bytes);
  const fs::path plain = is_compressed(path) ? path.stem() : path;
  if (path.extension() == ".parquet") return std::make_unique<ParquetDocuments>(path, options);
  if (plain.extension() == ".jsonl") return std::make_unique<JsonlDocuments>(path, options);
  return std::make_unique<TextDocuments>(path, options);
}

}  // namespace twell
