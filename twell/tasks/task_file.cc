// SPDX-License-Identifier: Apache-2.0
#include "twell/tasks/task_file.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "twell/base/content_hash.h"
#include "twell/base/error.h"
#include "twell/base/json.h"
#include "twell/data/decompress.h"
#include "twell/parquet/reader.h"
#include "twell/tasks/text_ops.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

constexpr size_t kMaxLine = size_t{16} << 20;
constexpr int kMaxDepth = 16;
constexpr std::string_view kLines = ".jsonl", kParquet = ".parquet";

// Reads the lines of a file, decompressed by its extension.
class LineReader {
 public:
  explicit LineReader(const fs::path& path) : path_(path), reader_(path) {}

  // Returns false at the end. The line is valid until the next call.
  bool next(std::string_view& line) {
    size_t end = 0;
    while ((end = buffer_.find('\n', begin_)) == std::string::npos && grow()) {
    }
    end = std::min(end, buffer_.size());
    if (begin_ == buffer_.size() && ended_) return false;
    line = std::string_view(buffer_).substr(begin_, end - begin_);
    begin_ = std::min(end + 1, buffer_.size());
    if (++number_ == 1 && line.starts_with("\xEF\xBB\xBF")) line.remove_prefix(3);
    return true;
  }
  int64_t number() const { return number_; }  // number of the last line, from 1

 private:
  bool grow() {
    if (ended_) return false;
    TWELL_REQUIRE(buffer_.size() - begin_ <= kMaxLine, "{} line {} is longer than {} MiB",
                  path_.string(), number_ + 1, kMaxLine >> 20);
    buffer_.erase(0, begin_);
    begin_ = 0;
    constexpr size_t kChunk = size_t{256} << 10;
    const size_t before = buffer_.size();
    buffer_.resize(before + kChunk);
    const size_t count = reader_.read(std::span(buffer_).subspan(before));
    buffer_.resize(before + count);
    ended_ = count == 0;
    return !ended_;
  }

  fs::path path_;
  ByteReader reader_;
  std::string buffer_;
  size_t begin_ = 0;
  int64_t number_ = 0;
  bool ended_ = false;
};

// The path of the file or of a compressed version of it; empty when neither exists.
fs::path existing(const fs::path& path) {
  std::error_code ignored;
  for (const char* ending : {"", ".gz", ".xz", ".zst"}) {
    const fs::path candidate = path.string() + ending;
    if (fs::exists(candidate, ignored)) return candidate;
  }
  return {};
}

// Paths that may hold a task's items, in order of preference.
std::vector<std::string> candidates(const Task& task) {
  std::vector<std::string> out = {fmt::format("{}{}", task.name, kLines),
                                  fmt::format("{}{}", task.name, kParquet)};
  for (const std::string_view folder : split_text(task.folders, ' ')) {
    out.push_back(fmt::format("{}/{}{}", folder, task.split, kLines));
    out.push_back(fmt::format("{}/{}-00000-of-00001{}", folder, task.split, kParquet));
    out.push_back(fmt::format("{}/{}/0000{}", folder, task.split, kParquet));
  }
  for (const std::string_view file : split_text(task.files, ' ')) out.emplace_back(file);
  return out;
}

fs::path find_file(const Task& task, const fs::path& folder) {
  TWELL_REQUIRE(fs::is_directory(folder), "{} is not a folder (--task-data)", folder.string());
  for (const std::string& name : candidates(task)) {
    const fs::path found = existing(folder / name);
    if (!found.empty()) return found;
  }
  throw InputError(fmt::format(
      "no items of {} in {}: looked for {}{} (or .gz, .xz, .zst of it), {}{}, and {}{} or "
      "{}-00000-of-00001{} in {}",
      task.name, folder.string(), task.name, kLines, task.name, kParquet, task.split, kLines,
      task.split, kParquet, replace_all(task.folders, " ", ", ")));
}

// Reads the labels of a file of items: dev-labels.lst for dev.jsonl.gz.
std::vector<std::string> read_labels(const fs::path& items) {
  const std::string name = items.filename().string();
  const fs::path path = items.parent_path() / (name.substr(0, name.find(kLines)) + "-labels.lst");
  std::vector<std::string> labels;
  if (!fs::exists(path)) return labels;
  LineReader reader(path);
  for (std::string_view line; reader.next(line);) labels.emplace_back(strip(line));
  return labels;
}

struct ItemReader {
  const Task& task;
  int64_t limit;
  TaskData& out;
  ContentHash hash{};

  bool full() const { return limit > 0 && std::ssize(out.items) == limit; }
  void add(const nlohmann::json& item, const std::string& where, int64_t line) {
    out.items.push_back(task.read(item, where));
    out.items.back().line = line;
  }

  void lines() {
    const std::vector<std::string> labels = read_labels(out.file);
    LineReader reader(out.file);
    std::string_view line;
    while (!full() && reader.next(line)) {
      if (strip(line).empty()) continue;
      const std::string where = fmt::format("{} line {}", out.file.string(), reader.number());
      nlohmann::json item = parse_json(line, where, {.depth = kMaxDepth, .keys = JsonKeys::kLast});
      hash.add_bytes(std::as_bytes(std::span(line)));
      if (out.items.size() < labels.size() && item.is_object() && !item.contains("label")) {
        item["label"] = labels[out.items.size()];
        hash.add_bytes(std::as_bytes(std::span(labels[out.items.size()])));
      }
      add(item, where, reader.number());
    }
  }

  void parquet() {
    ParquetReader reader(out.file);
    nlohmann::json item;
    while (!full() && reader.next(item)) {
      const std::string text = item.dump();
      hash.add_bytes(std::as_bytes(std::span(text)));
      add(item, fmt::format("{} row {}", out.file.string(), reader.row()), reader.row());
    }
  }
};

}  // namespace

TaskData load_task(const Task& task, const fs::path& folder, int64_t limit) {
  TaskData out;
  out.file = find_file(task, folder);
  ItemReader read{task, limit, out};
  if (out.file.extension() == kParquet) {
    read.parquet();
  } else {
    read.lines();
  }
  TWELL_REQUIRE(!out.items.empty(), "{} holds no items", out.file.string());
  out.hash = read.hash.digest();
  return out;
}

}  // namespace twell
