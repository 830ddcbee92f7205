// SPDX-License-Identifier: Apache-2.0
// Files: memory-mapped reading, and writes that either happen whole or not at all.
// Only regular files are read; a pipe or device is refused without waiting for it.
// Writes go to `.NAME.tmp.PID` in the target's folder first. One that a killed process left behind
// is removed by the next write to the same target. Every failure is an InputError naming the path
// and the system's reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace twell {

// Read-only mapping of a whole regular file; unmapped on destruction.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::filesystem::path& path() const { return path_; }
  // The whole file will be read, mostly forward: the system may fetch large pieces ahead.
  void expect_full_read() const;
  // Pages wholly within `part` may leave memory, so that a file larger than memory can be read
  // through. Reading them again reads the file again.
  void release(std::span<const std::byte> part) const;

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

std::string read_file(const std::filesystem::path& path);

// A file being written under a temporary name in the folder of `path`. commit() syncs it and
// renames it into place; without commit() the destructor removes it and `path` keeps its content.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  uint64_t size() const { return size_; }
  void commit();

 private:
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int fd_ = -1;
  uint64_t size_ = 0;
};

void write_file_atomic(const std::filesystem::path& path, std::string_view text);

// Fills a temporary folder next to `path` through fill(folder), syncs it, and swaps it into place;
// an existing folder is replaced only once the new one is complete.
void write_folder_atomic(const std::filesystem::path& path,
                         const std::function<void(const std::filesystem::path&)>& fill);

// Moves the complete folder `fresh` to `target` beside it. Former content of `target` is removed
// once it is replaced.
void put_folder_in_place(const std::filesystem::path& fresh, const std::filesystem::path& target);

// Creates the folder and its parents; an InputError when that cannot be done.
void make_folder(const std::filesystem::path& path);

// Whether the bytes are a Git LFS pointer, which stands for a file that was not fetched.
bool is_lfs_pointer(std::string_view start);
inline constexpr std::string_view kLfsAdvice =
    "it is a Git LFS pointer, not the file that it stands for: fetch that with 'git lfs pull'";

}  // namespace twell
