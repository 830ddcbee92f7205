// SPDX-License-Identifier: Apache-2.0
#include "twell/data/shard_work.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/json.h"
#include "twell/base/utf8.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

using nlohmann::json;

constexpr const char* kTokenizerFiles[] = {"tokenizer.json", "tokenizer_config.json"};

// The path as text for JSON: bytes that are not UTF-8 become \xNN.
std::string path_text(const fs::path& path) {
  const std::string bytes = fs::absolute(path).lexically_normal().string();
  std::string text;
  for (std::string_view rest = bytes;;) {
    const size_t valid = find_invalid_utf8(rest);
    text += rest.substr(0, valid);
    if (valid == rest.size()) return text;
    text += fmt::format("\\x{:02x}", static_cast<unsigned char>(rest[valid]));
    rest.remove_prefix(valid + 1);
  }
}

std::string file_line(const TextFile& file) {
  return fmt::format("{} {} {}", file.bytes, file.modified, path_text(file.path));
}

constexpr std::string_view kRowGroups = ", row groups ";

std::string unit_line(const TextUnit& unit) {
  const std::string file = file_line(unit.file);
  if (unit.row_groups == ParquetRowGroups{}) return file;
  return fmt::format("{}{}{} to {}", file, kRowGroups, unit.row_groups.first + 1,
                     unit.row_groups.end);
}

std::string_view path_of(std::string_view line) {
  for (int field = 0; field < 2; ++field) line.remove_prefix(line.find(' ') + 1);
  return line.substr(0, line.rfind(kRowGroups));
}

json source_of(const json& options, const TextSource& source) {
  json out = {{"options", options}, {"files", json::array()}};
  for (const TextUnit& file : source.files()) out["files"].push_back(file_line(file.file));
  return out;
}

// The object in the file; null where there is none.
json read_json(const fs::path& path) {
  if (!fs::exists(path)) return {};
  try {
    json out = parse_json(read_file(path), path.string());
    return out.is_object() ? out : json();
  } catch (const InputError&) {
    return {};
  }
}

// The first option that differs, with both values; empty when none does.
std::string difference(const json& before, const json& now) {
  if (!before.is_object()) return "its source.json is damaged";
  for (const auto& [name, value] : now.items()) {
    const json old = before.value(name, json());
    if (old != value) return fmt::format("{} was {}, now {}", name, old.dump(), value.dump());
  }
  return "";
}

std::string record_name(int64_t number) { return fmt::format("{:05}.json", number); }

}  // namespace

ShardWork::Lock::Lock(const fs::path& folder)
    : fd_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  TWELL_REQUIRE(fd_ >= 0, "cannot open {}: {}", folder.string(), std::strerror(errno));
  // A file system without locks leaves the folder unlocked.
  bool taken = ::flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  // Between opening and locking, another process may have moved the folder into place.
  struct stat here {
  }, locked{};
  taken |= ::stat(folder.c_str(), &here) != 0 || ::fstat(fd_, &locked) != 0 ||
           here.st_ino != locked.st_ino;
  if (!taken) return;
  ::close(fd_);
  throw InputError(fmt::format("another process is making shards in {}", folder.string()));
}

ShardWork::Lock::~Lock() { ::close(fd_); }

ShardWork::ShardWork(const fs::path& target, const json& options, const TextSource& source,
                     const std::vector<std::vector<TextUnit>>& parts, bool redo_changed,
                     bool replace)
    : target_(target.has_filename() ? target : target.parent_path()),
      folder_(target_.string() + ".partial") {
  TWELL_REQUIRE(!fs::exists(target_) || fs::is_directory(target_),
                "cannot create folder {}: a file of that name exists", target_.string());
  make_folder(folder_);
  lock_ = std::make_unique<Lock>(folder_);
  for (const std::vector<TextUnit>& units : parts) {
    FinishedPart& part = parts_.emplace_back();
    for (const TextUnit& unit : units) part.inputs.push_back(unit_line(unit));
  }
  finished_.assign(parts_.size(), false);

  const json now = source_of(options, source), before = read_json(folder_ / "source.json");
  const std::vector<FinishedPart> found =
      before.is_null() ? std::vector<FinishedPart>() : read_parts();
  try {
    if (!found.empty()) {
      const std::string other = difference(before.value("options", json()), options);
      TWELL_REQUIRE(other.empty(),
                    "{} holds parts made with other options ({}): repeat those options, or delete "
                    "the folder to begin again",
                    folder_.string(), other);
      take_over(found, source, redo_changed);
    }
  } catch (const InputError&) {
    if (!replace) throw;
    finished_.assign(parts_.size(), false);
  }
  // Without finished parts nothing depends on a tokenizer that was trained on other text.
  std::error_code ignored;
  if (finished() == 0 && before != now) {
    for (const char* const name : kTokenizerFiles) fs::remove(folder_ / name, ignored);
  }
  number_the_rest();
  source_json_ = now.dump(1);
  ShardManifest kept;
  for (const FinishedPart& part : parts_) {
    for (size_t s = 0; s < kSplits; ++s) {
      kept.shards[s].insert(kept.shards[s].end(), part.manifest.shards[s].begin(),
                            part.manifest.shards[s].end());
    }
  }
  remove_all_but(kept);
  make_folder(folder_ / "parts");
  write_file_atomic(folder_ / "source.json", source_json_ + "\n");
}

ShardWork::~ShardWork() {
  std::error_code ignored;
  if (!placed_ && finished() == 0) fs::remove_all(folder_, ignored);
}

bool ShardWork::is_finished(size_t index) const {
  const std::lock_guard lock(mutex_);
  return finished_[index];
}

int64_t ShardWork::finished() const {
  const std::lock_guard lock(mutex_);
  return std::count(finished_.begin(), finished_.end(), true);
}

// The parts whose record is readable and whose shards have the right size.
std::vector<FinishedPart> ShardWork::read_parts() const {
  std::vector<FinishedPart> parts;
  std::error_code error;
  for (fs::directory_iterator entry(folder_ / "parts", error), end; !error && entry != end;
       entry.increment(error)) {
    const json record = read_json(entry->path());
    if (record.is_null()) continue;
    try {
      FinishedPart part{record.at("number").get<int64_t>(),
                        record.at("inputs").get<std::vector<std::string>>(),
                        {.files = record.at("units_skipped").get<int64_t>(),
                         .rows = record.value("rows_skipped", int64_t{0})},
                        parse_shard_manifest(record.at("shards").dump(), entry->path().string())};
      bool whole = entry->path().filename() == record_name(part.number);
      for (const std::vector<ShardFile>& shards : part.manifest.shards) {
        for (const ShardFile& shard : shards) {
          std::error_code missing;
          const auto bytes = static_cast<int64_t>(fs::file_size(folder_ / shard.name, missing));
          whole = whole && !missing && bytes == shard.tokens * part.manifest.id_bytes();
        }
      }
      if (whole) parts.push_back(std::move(part));
    } catch (const InputError&) {
    } catch (const json::exception&) {
    }
  }
  return parts;
}

void ShardWork::take_over(const std::vector<FinishedPart>& found, const TextSource& source,
                          bool redo_changed) {
  std::map<std::vector<std::string>, size_t> index_of;
  for (size_t i = 0; i < parts_.size(); ++i) index_of[parts_[i].inputs] = i;
  std::set<std::string, std::less<>> files, paths;
  for (const TextUnit& file : source.files()) {
    files.insert(file_line(file.file));
    paths.insert(path_text(file.file.path));
  }
  for (const FinishedPart& part : found) {
    const auto index = index_of.find(part.inputs);
    if (index == index_of.end()) {
      if (redo_changed) continue;
      std::string_view path, why = "whose neighbours have changed";
      for (const std::string& line : part.inputs) {
        path = path_of(line);
        if (files.contains(std::string_view(line).substr(0, line.rfind(kRowGroups)))) continue;
        why = paths.contains(path) ? "which has changed since" : "which is no longer there";
        break;
      }
      throw InputError(fmt::format(
          "{} holds a finished part made from {}, {}: restore it, make the part again with "
          "--changed-files redo, or delete the folder to begin again",
          folder_.string(), path, why));
    }
    // With BadFile::kError a part that skipped something must be made again.
    if (part.skipped.any() && source.options().bad_file == BadFile::kError) continue;
    parts_[index->second] = part;
    finished_[index->second] = true;
  }
}

// A part's number is its position in the job. Where a part that was finished before has that
// number, because new files have shifted the positions, it gets one that no part has.
void ShardWork::number_the_rest() {
  std::set<int64_t> used;
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (finished_[i]) used.insert(parts_[i].number);
  }
  int64_t spare = std::ssize(parts_);
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (finished_[i]) continue;
    parts_[i].manifest = {};
    parts_[i].skipped = {};
    parts_[i].number = static_cast<int64_t>(i);
    while (!used.insert(parts_[i].number).second) parts_[i].number = spare++;
  }
}

// Removes what an interrupted job left unfinished: shards without a record, records of parts to be
// made again, temporary files.
void ShardWork::remove_all_but(const ShardManifest& kept) const {
  std::set<std::string> names = {"source.json", "manifest.json", "parts"};
  names.insert(std::begin(kTokenizerFiles), std::end(kTokenizerFiles));
  for (const std::vector<ShardFile>& shards : kept.shards) {
    for (const ShardFile& shard : shards) names.insert(shard.name);
  }
  std::set<std::string> records;
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (finished_[i]) records.insert(record_name(parts_[i].number));
  }
  std::error_code error;
  for (const auto& [folder, keep] : {std::pair(folder_, &names), {folder_ / "parts", &records}}) {
    std::vector<fs::path> others;
    for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
         entry.increment(error)) {
      if (!keep->contains(entry->path().filename().string())) others.push_back(entry->path());
    }
    for (const fs::path& other : others) fs::remove_all(other, error);
  }
}

void ShardWork::finish(size_t index, ShardManifest manifest, const TextSkips& skipped) {
  FinishedPart part = parts_[index];
  part.manifest = std::move(manifest);
  part.skipped = skipped;
  const json record = {{"number", part.number},
                       {"inputs", part.inputs},
                       {"units_skipped", part.skipped.files},
                       {"rows_skipped", part.skipped.rows},
                       {"shards", json::parse(to_json(part.manifest))}};
  write_file_atomic(folder_ / "parts" / record_name(part.number), record.dump(1) + "\n");
  const std::lock_guard lock(mutex_);
  parts_[index] = std::move(part);
  finished_[index] = true;
}

void ShardWork::discard() {
  const std::lock_guard lock(mutex_);
  finished_.assign(parts_.size(), false);
}

void ShardWork::place(const ShardManifest& manifest, const TextSkips& skipped) {
  json source = json::parse(source_json_);
  source["files_skipped"] = skipped.files;
  source["rows_skipped"] = skipped.rows;
  write_file_atomic(folder_ / "source.json", source.dump(1) + "\n");
  write_file_atomic(folder_ / "manifest.json", to_json(manifest));
  remove_all_but(manifest);
  put_folder_in_place(folder_, target_);
  placed_ = true;
  std::error_code ignored;
  fs::remove_all(target_ / "parts", ignored);
}

bool shards_made_from(const fs::path& folder, const json& options, const TextSource& source) {
  if (!fs::exists(folder / "manifest.json")) return false;
  json before = read_json(folder / "source.json");
  if (before.is_null()) return false;
  bool gaps = false;
  for (const char* skipped : {"files_skipped", "rows_skipped"}) {
    gaps = gaps || before.value(skipped, json(0)) != 0;
    before.erase(skipped);
  }
  if (gaps && source.options().bad_file == BadFile::kError) return false;
  return before == source_of(options, source);
}

}  // namespace twell
