// SPDX-License-Identifier: Apache-2.0
#include "twell/base/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "twell/base/error.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

[[noreturn]] void fail(const char* what, const fs::path& path) {
  throw InputError(fmt::format("cannot {} {}: {}", what, path.string(), std::strerror(errno)));
}

class Descriptor {
 public:
  Descriptor(const fs::path& path, int flags) : fd_(::open(path.c_str(), flags | O_CLOEXEC)) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

uintptr_t page_size() { return static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE)); }

fs::path parent_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

// Makes a rename or a new name in the folder survive a power cut.
void sync_folder(const fs::path& folder) {
  Descriptor fd(folder, O_RDONLY | O_DIRECTORY);
  if (fd.get() >= 0) ::fsync(fd.get());
}

// Puts `fresh` in the place of `target`, whose former content ends up under the name of `fresh`.
// Atomic if the file system can exchange two names; otherwise `target` is missing for an instant.
void replace_folder(const fs::path& fresh, const fs::path& target) {
  if (::renameat2(AT_FDCWD, fresh.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) == 0) return;
  const fs::path old = fs::path(fresh.string() + ".old");
  if (std::rename(target.c_str(), old.c_str()) != 0) fail("replace", target);
  if (std::rename(fresh.c_str(), target.c_str()) != 0) {
    const int error = errno;
    std::rename(old.c_str(), target.c_str());
    errno = error;
    fail("replace", target);
  }
  std::rename(old.c_str(), fresh.c_str());
}

// Temporary names are `.NAME.tmp.PID`.
fs::path temporary_name(const fs::path& path) {
  return parent_of(path) / fmt::format(".{}.tmp.{}", path.filename().string(), ::getpid());
}

// Marks a temporary file or folder as in use until the descriptor is closed, at the latest when the
// process ends. A file system without locks leaves it unmarked.
void mark_in_use(int fd) { ::flock(fd, LOCK_EX | LOCK_NB); }

// The number of a process on another machine or in a container means nothing here, so the lock must
// be free too.
bool is_abandoned(const fs::path& temporary, pid_t writer) {
  if (::kill(writer, 0) == 0 || errno != ESRCH) return false;
  const Descriptor fd(temporary, O_RDONLY | O_NONBLOCK | O_NOFOLLOW);
  return fd.get() >= 0 && ::flock(fd.get(), LOCK_EX | LOCK_NB) == 0;
}

// Removes temporary files and folders of `path` left behind by killed processes. Failing to remove
// one does not prevent writing.
void remove_abandoned(const fs::path& path) {
  const std::string prefix = fmt::format(".{}.tmp.", path.filename().string());
  std::error_code error;
  std::vector<fs::path> abandoned;
  for (fs::directory_iterator it(parent_of(path), error), end; !error && it != end;
       it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with(prefix)) continue;
    pid_t writer = 0;
    const char* last = name.data() + name.size();
    const auto number = std::from_chars(name.data() + prefix.size(), last, writer);
    if (number.ec != std::errc() || number.ptr != last || writer <= 0) continue;
    if (is_abandoned(it->path(), writer)) abandoned.push_back(it->path());
  }
  for (const fs::path& leftover : abandoned) fs::remove_all(leftover, error);
}

}  // namespace

MappedFile::MappedFile(const fs::path& path) : path_(path) {
  // Opening a pipe without O_NONBLOCK would wait for a writer.
  Descriptor fd(path, O_RDONLY | O_NONBLOCK | O_NOCTTY);
  struct stat info {};
  if (fd.get() < 0 || ::fstat(fd.get(), &info) != 0) fail("open", path);
  TWELL_REQUIRE(S_ISREG(info.st_mode), "cannot open {}: not a regular file", path.string());
  size_ = static_cast<size_t>(info.st_size);
  if (size_ == 0) return;  // mmap refuses an empty range
  void* data = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (data == MAP_FAILED) fail("map", path);
  data_ = static_cast<const std::byte*>(data);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

// Only advice, here and in release: the system may ignore it.
void MappedFile::expect_full_read() const {
#ifdef MADV_HUGEPAGE
  // Linux then reads 4 MiB ahead whatever the disk's setting (often 128 KiB), into 2 MiB pages if
  // the file system has them. MADV_WILLNEED would use 4 KiB pages, for ten times the CPU time.
  if (size_ > 0) ::madvise(const_cast<std::byte*>(data_), size_, MADV_HUGEPAGE);
#endif
}

void MappedFile::release(std::span<const std::byte> part) const {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(part.data());
  const uintptr_t first = (begin + page_size() - 1) / page_size() * page_size();
  const uintptr_t last = (begin + part.size()) / page_size() * page_size();
  if (first < last) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

std::string read_file(const fs::path& path) {
  const MappedFile file(path);
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

AtomicFile::AtomicFile(fs::path path) : path_(std::move(path)), temporary_(temporary_name(path_)) {
  // Renaming onto a device or a pipe would replace it.
  std::error_code ignored;
  TWELL_REQUIRE(!fs::exists(path_, ignored) || fs::is_regular_file(path_, ignored),
                "cannot write {}: not a regular file", path_.string());
  remove_abandoned(path_);
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0) fail("write", path_);
  mark_in_use(fd_);
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) {
    ::close(fd_);
    ::unlink(temporary_.c_str());
  }
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(fd_, bytes.data(), bytes.size());
    if (count < 0) {
      if (errno == EINTR) continue;
      fail("write", path_);
    }
    bytes = bytes.subspan(static_cast<size_t>(count));
    size_ += static_cast<uint64_t>(count);
  }
}

void AtomicFile::commit() {
  if (::fsync(fd_) != 0) fail("write", path_);
  if (::close(std::exchange(fd_, -1)) != 0 || std::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary_.c_str());
    errno = error;
    fail("write", path_);
  }
  sync_folder(parent_of(path_));
}

void write_file_atomic(const fs::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

void make_folder(const fs::path& path) {
  std::error_code error;
  fs::create_directories(path, error);
  TWELL_REQUIRE(!error && fs::is_directory(path), "cannot create folder {}: {}", path.string(),
                error ? error.message() : "a file of that name exists");
}

void put_folder_in_place(const fs::path& fresh, const fs::path& target) {
  std::error_code ignored;
  sync_folder(fresh);
  if (fs::exists(target, ignored)) {
    replace_folder(fresh, target);
  } else if (std::rename(fresh.c_str(), target.c_str()) != 0) {
    fail("write", target);
  }
  sync_folder(parent_of(target));
  fs::remove_all(fresh, ignored);  // holds the former content after an exchange
}

void write_folder_atomic(const fs::path& path, const std::function<void(const fs::path&)>& fill) {
  const fs::path target = path.has_filename() ? path : path.parent_path();
  std::error_code ignored;
  TWELL_REQUIRE(!fs::exists(target, ignored) || fs::is_directory(target, ignored),
                "cannot create folder {}: a file of that name exists", target.string());
  make_folder(parent_of(target));
  remove_abandoned(target);
  const fs::path temporary = temporary_name(target);
  fs::remove_all(temporary, ignored);
  try {
    make_folder(temporary);
    const Descriptor in_use(temporary, O_RDONLY | O_DIRECTORY);
    mark_in_use(in_use.get());
    fill(temporary);
    put_folder_in_place(temporary, target);
  } catch (...) {
    fs::remove_all(temporary, ignored);
    throw;
  }
}

bool is_lfs_pointer(std::string_view start) {
  return start.starts_with("version https://git-lfs.github.com/spec/");
}

}  // namespace twell
