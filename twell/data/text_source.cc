// SPDX-License-Identifier: Apache-2.0
#include "twell/data/text_source.h"

#include <algorithm>
#include <utility>

#include "twell/base/error.h"
#include "twell/base/utf8.h"
#include "twell/data/text_files.h"

namespace twell {
namespace {

constexpr int64_t kReportsByName = 5;  // skipped files named one by one

}  // namespace

struct TextSource::Impl {
  explicit Impl(const TextSourceOptions& options_in) : options(options_in) {
    TWELL_REQUIRE(options.max_bytes >= 0, "the number of bytes of text must not be negative: {}",
                  options.max_bytes);
    files = list_text_files(options.paths, [&](const std::string& fault) {
      if (options.bad_file == BadFile::kError) throw InputError(fault);
      ++folders_skipped;
      report(fault);
    });
    for (const TextFile& file : files) total_bytes += file.bytes;
  }

  void report(const std::string& fault) const {
    if (!first_pass || !options.log || skipped() > kReportsByName) return;
    options.log(LogLevel::kWarning, "skipped: " + fault);
  }

  void report_end() {
    if (first_pass && options.log && skipped() > kReportsByName) {
      options.log(LogLevel::kWarning, fmt::format("skipped {} bad files in all", skipped()));
    }
    first_pass = false;
  }

  // The next piece: of the current file, or of the next file that has one.
  bool next(TextPiece& piece) {
    while (index < files.size()) {
      const TextFile& file = files[index];
      try {
        if (!reader) {
          reader = DocumentReader::open(
              file.path, {.json_field = options.json_field, .piece_bytes = options.piece_bytes});
        }
        if (reader->next(piece)) return true;
      } catch (const InputError& fault) {
        if (options.bad_file == BadFile::kError) throw;
        ++files_skipped;
        report(fault.what());
      }
      reader.reset();
      finished_bytes += file.bytes;
      ++index;
    }
    return false;
  }

  bool next_within_limit(TextPiece& piece) {
    if (options.max_bytes == 0) return next(piece);
    const int64_t room = options.max_bytes - text_bytes;
    if (room <= 0 || !next(piece)) return false;
    piece.text.resize(utf8_prefix(piece.text, static_cast<size_t>(room)));
    text_bytes += static_cast<int64_t>(piece.text.size());
    if (!piece.text.empty()) return true;
    text_bytes = options.max_bytes;  // not even one more character fits
    return false;
  }

  void rewind() {
    if (index > 0 || reader) first_pass = false;
    reader.reset();
    index = 0;
    finished_bytes = text_bytes = files_skipped = 0;
  }

  int64_t bytes_read() const {
    if (!reader) return finished_bytes;
    return finished_bytes + std::min(reader->file_bytes_read(), files[index].bytes);
  }
  int64_t skipped() const { return folders_skipped + files_skipped; }

  TextSourceOptions options;
  std::vector<TextFile> files;
  int64_t total_bytes = 0;
  int64_t folders_skipped = 0;
  bool first_pass = true;

  size_t index = 0;  // the current file
  std::unique_ptr<DocumentReader> reader;
  int64_t finished_bytes = 0;  // on disk, files before the current one
  int64_t text_bytes = 0;      // returned so far
  int64_t files_skipped = 0;
};

TextSource::TextSource(const TextSourceOptions& options) : impl_(std::make_unique<Impl>(options)) {}
TextSource::~TextSource() = default;
bool TextSource::next(TextPiece& piece) {
  if (impl_->next_within_limit(piece)) return true;
  impl_->report_end();
  return false;
}
bool TextSource::next(std::string& text) {
  TextPiece piece;
  piece.text.swap(text);
  const bool found = next(piece);
  text.swap(piece.text);
  return found;
}
void TextSource::rewind() { impl_->rewind(); }
int64_t TextSource::total_bytes() const { return impl_->total_bytes; }
int64_t TextSource::bytes_read() const { return impl_->bytes_read(); }
int64_t TextSource::files_skipped() const { return impl_->skipped(); }

}  // namespace twell
