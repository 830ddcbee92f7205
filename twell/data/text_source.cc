// SPDX-License-Identifier: Apache-2.0
#include "twell/data/text_source.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

#include "twell/base/error.h"
#include "twell/base/utf8.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kReportsByName = 5;  // skipped files named one by one

// Expands paths, which keep their order, into files. An entry of a folder that cannot be looked at
// or listed is reported to on_fault(reason), which may throw.
class Lister {
 public:
  explicit Lister(const std::function<void(const std::string&)>& on_fault) : on_fault_(on_fault) {}

  void add_path(const fs::path& path) {
    struct stat info {};
    const bool found = ::stat(path.c_str(), &info) == 0;
    TWELL_REQUIRE(found, "cannot read {}: {}", path.string(), std::strerror(errno));
    if (S_ISDIR(info.st_mode)) {
      const size_t before = files_.size() + repeated_;
      add_folder(path);
      TWELL_REQUIRE(files_.size() + repeated_ > before,
                    "no text files in folder {} (hidden files do not count)", path.string());
      return;
    }
    TWELL_REQUIRE(S_ISREG(info.st_mode), "cannot read {}: neither a regular file nor a folder",
                  path.string());
    add_file(path, info);
  }

  std::vector<TextFile> take() { return std::move(files_); }

 private:
  void add_folder(const fs::path& folder) {
    std::error_code error;
    std::vector<fs::path> names;
    fs::directory_iterator entry(folder, error);
    for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
      fs::path name = entry->path().filename();
      if (name.native().front() != '.') names.push_back(std::move(name));
    }
    if (error) {
      on_fault_(fmt::format("cannot read folder {}: {}", folder.string(), error.message()));
    }
    std::sort(names.begin(), names.end(),
              [](const fs::path& a, const fs::path& b) { return a.native() < b.native(); });
    for (const fs::path& name : names) add_entry(folder / name);
  }

  void add_entry(const fs::path& path) {
    struct stat link {
    }, target{};
    if (::lstat(path.c_str(), &link) != 0) {
      on_fault_(fmt::format("cannot read {}: {}", path.string(), std::strerror(errno)));
      return;
    }
    if (::stat(path.c_str(), &target) != 0) {
      const int code = errno;
      std::error_code ignored;
      on_fault_(fmt::format("cannot read {}, a link to {}: {}", path.string(),
                            fs::read_symlink(path, ignored).string(), std::strerror(code)));
      return;
    }
    if (S_ISDIR(link.st_mode)) {
      add_folder(path);
    } else if (S_ISREG(target.st_mode)) {
      add_file(path, target);
    }
  }

  void add_file(const fs::path& path, const struct stat& info) {
    if (seen_.emplace(info.st_dev, info.st_ino).second) {
      const int64_t modified = int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec;
      files_.push_back({path, static_cast<int64_t>(info.st_size), modified});
    } else {
      ++repeated_;
    }
  }

  const std::function<void(const std::string&)>& on_fault_;
  std::vector<TextFile> files_;
  std::set<std::pair<dev_t, ino_t>> seen_;
  size_t repeated_ = 0;
};

// The row groups of the file as units of at most part_bytes, or of one row group if that is larger.
// A file that cannot be opened is one unit, so that its fault comes up where it is read.
std::vector<TextUnit> cut_at_row_groups(const TextUnit& whole, const std::string& field,
                                        int64_t part_bytes) {
  std::vector<int64_t> bytes;
  try {
    bytes = ParquetReader(whole.file.path, {field}).row_group_bytes();
  } catch (const InputError&) {
  }
  if (bytes.size() < 2) return {whole};
  std::vector<TextUnit> units;
  for (size_t group = 0; group < bytes.size(); ++group) {
    if (units.empty() || units.back().bytes + bytes[group] > part_bytes) {
      units.push_back({whole.file, {group, group}, 0});
    }
    units.back().row_groups.end = group + 1;
    units.back().bytes += bytes[group];
  }
  return units;
}

}  // namespace

TextStream::TextStream(std::vector<TextUnit> units, TextSourceOptions options,
                       std::function<void(const std::string&)> on_skip)
    : units_(std::move(units)), options_(std::move(options)), on_skip_(std::move(on_skip)) {}

std::function<void(const std::string&)> TextStream::on_bad_row() {
  if (options_.bad_file == BadFile::kError) return {};
  return [this](const std::string& fault) {
    ++skipped_.rows;
    if (on_skip_) on_skip_(fault);
  };
}

// The next piece: of the current unit, or of the next unit that has one.
bool TextStream::next_of_units(TextPiece& piece) {
  while (index_ < units_.size()) {
    const TextUnit& unit = units_[index_];
    try {
      if (!reader_) {
        reader_ = DocumentReader::open(unit.file.path, {.json_field = options_.json_field,
                                                        .piece_bytes = options_.piece_bytes,
                                                        .row_groups = unit.row_groups,
                                                        .on_bad_row = on_bad_row()});
      }
      if (reader_->next(piece)) return true;
    } catch (const InputError& fault) {
      if (options_.bad_file == BadFile::kError) throw;
      ++skipped_.files;
      if (on_skip_) on_skip_(fault.what());
    }
    reader_.reset();
    finished_bytes_ += unit.bytes;
    ++index_;
  }
  return false;
}

bool TextStream::next(TextPiece& piece) {
  if (options_.max_bytes == 0) return next_of_units(piece);
  const int64_t room = options_.max_bytes - text_bytes_;
  if (room <= 0 || !next_of_units(piece)) return false;
  piece.text.resize(utf8_prefix(piece.text, static_cast<size_t>(room)));
  text_bytes_ += static_cast<int64_t>(piece.text.size());
  if (!piece.text.empty()) return true;
  text_bytes_ = options_.max_bytes;  // not even one more character fits
  return false;
}

int64_t TextStream::bytes_read() const {
  if (!reader_) return finished_bytes_;
  return finished_bytes_ + std::min(reader_->file_bytes_read(), units_[index_].bytes);
}

void SkipLog::skipped(const std::string& fault) {
  if (log_ && ++count_ <= kReportsByName) log_(LogLevel::kWarning, "skipped: " + fault);
}

void SkipLog::end() {
  if (log_ && count_ > kReportsByName) {
    log_(LogLevel::kWarning, fmt::format("skipped {} bad files and rows in all", count_));
  }
  log_ = nullptr;
}

TextSource::TextSource(const TextSourceOptions& options)
    : options_(options), skip_log_(options.log) {
  TWELL_REQUIRE(options_.max_bytes >= 0, "the number of bytes of text must not be negative: {}",
                options_.max_bytes);
  const std::function<void(const std::string&)> on_fault = [this](const std::string& fault) {
    if (options_.bad_file == BadFile::kError) throw InputError(fault);
    ++unlisted_.files;
    skip_log_.skipped(fault);
  };
  TWELL_REQUIRE(!options_.paths.empty(), "no text given: name at least one file or folder");
  Lister lister(on_fault);
  for (const fs::path& path : options_.paths) lister.add_path(path);
  for (TextFile& file : lister.take()) {
    const int64_t bytes = file.bytes;
    files_.push_back({std::move(file), {}, bytes});
    total_bytes_ += bytes;
  }
  rewind();
}

bool TextSource::next(TextPiece& piece) {
  read_ = true;
  if (stream_->next(piece)) return true;
  skip_log_.end();
  return false;
}

bool TextSource::next(std::string& text) {
  TextPiece piece;
  piece.text.swap(text);
  const bool found = next(piece);
  text.swap(piece.text);
  return found;
}

void TextSource::rewind() {
  if (read_) skip_log_ = SkipLog(nullptr);
  stream_ = std::make_unique<TextStream>(
      files_, options_, [this](const std::string& fault) { skip_log_.skipped(fault); });
}

std::vector<std::vector<TextUnit>> TextSource::parts(int64_t part_bytes) const {
  if (options_.max_bytes > 0) return {files_};
  std::vector<std::vector<TextUnit>> parts;
  int64_t room = -1;  // of the last part for more files
  for (const TextUnit& file : files_) {
    if (file.bytes > part_bytes && file.file.path.extension() == ".parquet") {
      for (TextUnit& unit : cut_at_row_groups(file, options_.json_field, part_bytes)) {
        parts.push_back({std::move(unit)});
      }
      room = -1;  // nothing joins its last part
      continue;
    }
    if (file.bytes > room) {
      parts.emplace_back();
      room = part_bytes;
    }
    parts.back().push_back(file);
    room -= file.bytes;
  }
  return parts;
}

}  // namespace twell
