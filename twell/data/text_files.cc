// SPDX-License-Identifier: Apache-2.0
#include "twell/data/text_files.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

#include "twell/base/error.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

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
    if (::lstat(path.c_str(), &link) != 0 || ::stat(path.c_str(), &target) != 0) return;
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

}  // namespace

std::vector<TextFile> list_text_files(const std::vector<fs::path>& paths,
                                      const std::function<void(const std::string&)>& on_fault) {
  TWELL_REQUIRE(!paths.empty(), "no text given: name at least one file or folder");
  Lister lister(on_fault);
  for (const fs::path& path : paths) lister.add_path(path);
  return lister.take();
}

}  // namespace twell
