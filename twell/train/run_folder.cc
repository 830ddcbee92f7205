// SPDX-License-Identifier: Apache-2.0
#include "twell/train/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/train/trainer_state.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kPrefix = "step-";

// Folders being written or removed have names that start with a dot, so that they are never
// mistaken for checkpoints.
bool is_leftover(const fs::path& path) { return path.filename().string().starts_with('.'); }

std::optional<int64_t> checkpoint_step(const fs::path& folder) {
  const std::string name = folder.filename().string();
  if (!name.starts_with(kPrefix)) return std::nullopt;
  int64_t step = 0;
  const char* end = name.data() + name.size();
  const auto parsed = std::from_chars(name.data() + kPrefix.size(), end, step);
  if (parsed.ec != std::errc() || parsed.ptr != end) return std::nullopt;
  return step;
}

// Sorted from oldest to newest.
std::vector<Checkpoint> list_checkpoints(const fs::path& folder) {
  std::vector<Checkpoint> found;
  std::error_code missing;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, missing)) {
    const auto step = checkpoint_step(entry.path());
    if (step && entry.is_directory()) found.push_back({*step, entry.path()});
  }
  std::sort(found.begin(), found.end(),
            [](const Checkpoint& a, const Checkpoint& b) { return a.step < b.step; });
  return found;
}

void remove_leftovers(const fs::path& folder) {
  std::error_code ignored;
  std::vector<fs::path> leftovers;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    if (is_leftover(entry.path())) leftovers.push_back(entry.path());
  }
  for (const fs::path& path : leftovers) fs::remove_all(path, ignored);
}

// Renames the folder before deleting it, so that a crash never leaves part of a checkpoint under
// its name.
void remove_checkpoint(const fs::path& folder) {
  const fs::path hidden = folder.parent_path() / fmt::format(".{}.old", folder.filename().string());
  std::error_code ignored;
  fs::rename(folder, hidden, ignored);
  fs::remove_all(hidden, ignored);
}

void swap_link(const fs::path& link, const fs::path& target) {
  const fs::path fresh = link.parent_path() / fmt::format(".{}.new", link.filename().string());
  std::error_code error;
  fs::remove(fresh, error);
  fs::create_directory_symlink(target, fresh, error);
  if (!error) fs::rename(fresh, link, error);
  TWELL_REQUIRE(!error, "cannot write {}: {}", link.string(), error.message());
}

bool holds_run(const fs::path& folder) {
  return fs::exists(folder / "options.json") || fs::exists(folder / "metrics.jsonl") ||
         fs::exists(folder / "checkpoints");
}

// Whether the run has saved a checkpoint, which may be lost since: then the link dangles.
bool has_saved(const fs::path& folder) {
  std::error_code missing;
  return fs::is_symlink(folder / "checkpoint", missing) ||
         !list_checkpoints(folder / "checkpoints").empty();
}

int take_lock(const fs::path& folder) {
  const fs::path path = folder / ".lock";
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  TWELL_REQUIRE(fd >= 0, "cannot write {}: {}", path.string(), std::strerror(errno));
  if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    ::close(fd);
    throw InputError(fmt::format("another process is training in {}", folder.string()));
  }
  return fd;
}

}  // namespace

fs::path checkpoint_folder(const fs::path& folder) {
  if (folder.empty()) return folder;
  std::error_code ignored;
  const fs::path newest = folder / "checkpoint";
  const bool is_run =
      !fs::exists(folder / "config.json", ignored) && fs::exists(newest / "config.json", ignored);
  return is_run ? newest : folder;
}

RunFolder::RunFolder(const fs::path& path, bool resume) : path_(path) {
  TWELL_REQUIRE(!path.empty(), "no output folder given: add --out DIR");
  TWELL_REQUIRE(!resume || holds_run(path), "nothing to resume: {} holds no training run",
                path.string());
  make_folder(path);
  lock_ = take_lock(path);
  // A run that was ended before its first checkpoint has nothing to lose.
  if (!resume && has_saved(path)) {
    ::close(lock_);
    throw InputError(fmt::format(
        "{0} already holds a training run: continue it with `twell train --resume --out {0}`, or "
        "choose another folder",
        path.string()));
  }
  begins_again_ = holds_run(path) && !has_saved(path);
  remove_leftovers(path / "checkpoints");
}

RunFolder::~RunFolder() {
  if (lock_ >= 0) ::close(lock_);
}

void RunFolder::begin(const std::string& options) const {
  write_file_atomic(options_path(), options);
}

std::optional<Checkpoint> RunFolder::latest() const {
  const std::vector<Checkpoint> all = list_checkpoints(path_ / "checkpoints");
  return all.empty() ? std::nullopt : std::optional(all.back());
}

std::optional<Checkpoint> RunFolder::resume_point(const ResumeRequest& request) const {
  std::vector<Checkpoint> all = list_checkpoints(path_ / "checkpoints");
  TWELL_REQUIRE(!all.empty() || !has_saved(path_),
                "nothing to resume: the checkpoints of {} are lost; choose another --out to start "
                "again",
                path_.string());
  if (request.step) {
    while (!all.empty() && all.back().step > *request.step) all.pop_back();
    TWELL_REQUIRE(!all.empty() && all.back().step == *request.step,
                  "{} has no checkpoint of step {}", path_.string(), *request.step);
  }
  if (all.empty()) return std::nullopt;
  std::string newest_fault;
  for (; !all.empty(); all.pop_back()) {
    const std::string fault = checkpoint_fault(all.back().folder);
    if (newest_fault.empty()) newest_fault = fault;
    if (!fault.empty()) continue;
    if (newest_fault.empty() || request.fall_back) return all.back();
    throw InputError(fmt::format(
        "{}; the checkpoint of step {} is intact: resume from it with --fall-back or --resume-from "
        "{}",
        newest_fault, all.back().step, all.back().step));
  }
  throw InputError(fmt::format("{}; no older checkpoint is intact", newest_fault));
}

int64_t RunFolder::free_bytes() const {
  std::error_code error;
  const fs::space_info space = fs::space(path_, error);
  return error || space.capacity == 0 ? -1 : static_cast<int64_t>(space.available);
}

int64_t RunFolder::checkpoints() const {
  return std::ssize(list_checkpoints(path_ / "checkpoints"));
}

void RunFolder::discard_after(int64_t step) const {
  for (const Checkpoint& checkpoint : list_checkpoints(path_ / "checkpoints")) {
    if (checkpoint.step == step) {
      swap_link(link_path(), fs::path("checkpoints") / checkpoint.folder.filename());
    } else if (checkpoint.step > step) {
      remove_checkpoint(checkpoint.folder);
    }
  }
}

Checkpoint RunFolder::save(int64_t step, int64_t keep_last,
                           const std::function<void(const fs::path&)>& fill) const {
  const fs::path folder = path_ / "checkpoints";
  make_folder(folder);
  const std::string name = fmt::format("{}{:06}", kPrefix, step);
  write_folder_atomic(folder / name, fill);
  swap_link(link_path(), fs::path("checkpoints") / name);
  std::vector<Checkpoint> all = list_checkpoints(folder);
  const int64_t surplus = static_cast<int64_t>(all.size()) - keep_last;
  for (int64_t i = 0; i < surplus; ++i) remove_checkpoint(all[static_cast<size_t>(i)].folder);
  return {step, folder / name};
}

}  // namespace twell
