// SPDX-License-Identifier: Apache-2.0
#include "twell/base/file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <functional>
#include <stdexcept>

#include "twell/base/error.h"

namespace {

// Told of what a program syncs to the disk.
std::function<void(const std::filesystem::path&)> on_fsync;

}  // namespace

// In the place of the C library's.
extern "C" int fsync(int fd) {
  if (on_fsync) on_fsync(std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd)));
  return static_cast<int>(::syscall(SYS_fsync, fd));
}

namespace twell {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class File : public ::testing::Test {
 protected:
  File() {
    std::string name = (fs::temp_directory_path() / "twell_file_test.XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    folder_ = name;
  }
  ~File() override { fs::remove_all(folder_); }

  // Names in the folder, to which a failed write must not add.
  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      result.push_back(entry.path().filename().string());
    }
    std::sort(result.begin(), result.end());
    return result;
  }
  static void put(const fs::path& path, const std::string& text) { std::ofstream(path) << text; }

  fs::path folder_;
};

// Makes writes beyond `bytes` fail as on a full disk.
class SizeLimit {
 public:
  explicit SizeLimit(rlim_t bytes) {
    handler_ = std::signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~SizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  sighandler_t handler_;
};

template <typename Fn>
std::string refusal(const Fn& fn) {
  try {
    fn();
  } catch (const InputError& error) {
    return error.what();
  }
  return "not refused";
}

TEST_F(File, ReadsWhatWasWritten) {
  const fs::path path = folder_ / "a.txt";
  const std::string text("line\n\0\xff end", 11);
  write_file_atomic(path, text);
  EXPECT_EQ(read_file(path), text);
  write_file_atomic(path, "");
  EXPECT_EQ(read_file(path), "");
  EXPECT_THAT(names(), ElementsAre("a.txt"));
}

TEST_F(File, MappingMovesAndEndsOnce) {
  write_file_atomic(folder_ / "a", "aaa");
  write_file_atomic(folder_ / "b", "b");
  MappedFile a(folder_ / "a"), b(folder_ / "b");
  const MappedFile moved = std::move(a);
  EXPECT_EQ(moved.bytes().size(), 3u);
  b = MappedFile(folder_ / "a");
  EXPECT_EQ(b.bytes().size(), 3u);
  EXPECT_EQ(b.path(), folder_ / "a");
}

TEST_F(File, WhatCannotBeReadIsNamed) {
  const std::string missing = (folder_ / "missing").string();
  EXPECT_EQ(refusal([&] { read_file(missing); }),
            "cannot open " + missing + ": No such file or directory");
  EXPECT_THAT(refusal([&] { read_file(folder_); }), HasSubstr("not a regular file"));
}

TEST_F(File, APipeIsRefusedWithoutWaitingForAWriter) {
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(refusal([&] { read_file(folder_ / "pipe"); }), HasSubstr("not a regular file"));
  EXPECT_THAT(refusal([&] { read_file("/dev/null"); }), HasSubstr("not a regular file"));
}

TEST_F(File, LeftoversOfKilledProcessesAreRemovedByTheNextWrite) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) ::_exit(0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  const std::string dead = ".tmp." + std::to_string(child);
  const std::string alive = ".tmp." + std::to_string(::getppid());
  for (const std::string& suffix : {dead, alive}) {
    put(folder_ / (".a" + suffix), "half");
    fs::create_directory(folder_ / (".data" + suffix));
    put(folder_ / (".data" + suffix) / "x", "half");
  }
  put(folder_ / (".b" + dead), "of another target");
  put(folder_ / ".a.tmp.7x", "no process's");
  write_file_atomic(folder_ / "a", "1");
  write_folder_atomic(folder_ / "data", [](const fs::path& folder) { put(folder / "x", "1"); });
  EXPECT_THAT(names(), ::testing::UnorderedElementsAre(".a.tmp.7x", ".a" + alive, ".b" + dead,
                                                       ".data" + alive, "a", "data"));
}

TEST_F(File, ATemporaryInUseElsewhereIsKept) {
  // A process of another container: its number means nothing here, but it holds the lock.
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) ::_exit(0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  const fs::path other = folder_ / (".a.tmp." + std::to_string(child));
  const int fd = ::open(other.c_str(), O_WRONLY | O_CREAT, 0600);
  ASSERT_EQ(::flock(fd, LOCK_EX), 0);
  write_file_atomic(folder_ / "a", "1");
  EXPECT_TRUE(fs::exists(other));
  ::close(fd);
  write_file_atomic(folder_ / "a", "2");
  EXPECT_FALSE(fs::exists(other));
}

TEST_F(File, AnAbandonedWriteLeavesTheOldFile) {
  const fs::path path = folder_ / "a.txt";
  write_file_atomic(path, "old");
  {
    AtomicFile file(path);
    file.write("half of the new");
    EXPECT_EQ(file.size(), 15u);
  }
  EXPECT_EQ(read_file(path), "old");
  EXPECT_THAT(names(), ElementsAre("a.txt"));
}

// What a power cut may not take: the bytes before they get their name, then the name.
TEST_F(File, BytesAreOnTheDiskBeforeTheirName) {
  const fs::path folder = fs::canonical(folder_);
  std::vector<std::string> synced;
  const auto synced_by = [&](const auto& write, const fs::path& target) {
    synced.clear();
    on_fsync = [&](const fs::path& path) {
      std::string name = path == folder ? "." : fs::relative(path, folder).string();
      if (const size_t at = name.find(".tmp."); at != std::string::npos) name.resize(at + 4);
      synced.push_back(name + (fs::exists(target) ? " named" : ""));
    };
    write();
    on_fsync = nullptr;
    return synced;
  };
  EXPECT_THAT(synced_by([&] { write_file_atomic(folder / "a", "1"); }, folder / "a"),
              ElementsAre(".a.tmp", ". named"));
  const auto fill = [](const fs::path& in) { put(in / "b", "2"); };
  EXPECT_THAT(synced_by([&] { write_folder_atomic(folder / "f", fill); }, folder / "f" / "b"),
              ElementsAre(".f.tmp", ". named"));
  fs::remove(folder / "f" / "b");
  EXPECT_THAT(synced_by([&] { write_folder_atomic(folder / "f", fill); }, folder / "f" / "b"),
              ElementsAre(".f.tmp", ". named"));
}

TEST_F(File, AFullDiskLeavesTheOldFile) {
  const fs::path path = folder_ / "a.txt";
  write_file_atomic(path, "old");
  std::string message;
  {
    const SizeLimit limit(1000);
    message = refusal([&] { write_file_atomic(path, std::string(5000, 'x')); });
  }
  EXPECT_THAT(message, StartsWith("cannot write " + path.string() + ": "));
  EXPECT_EQ(read_file(path), "old");
  EXPECT_THAT(names(), ElementsAre("a.txt"));
}

TEST_F(File, WritingToWhatIsNoFileIsRefusedAndChangesNothing) {
  fs::create_directory(folder_ / "sub");
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  EXPECT_NE(refusal([&] { write_file_atomic(folder_ / "sub", "x"); }), "not refused");
  EXPECT_NE(refusal([&] { write_file_atomic(folder_ / "pipe", "x"); }), "not refused");
  EXPECT_NE(refusal([&] { write_file_atomic("/dev/full", "x"); }), "not refused");
  EXPECT_NE(refusal([&] { write_file_atomic(folder_ / "none" / "a", "x"); }), "not refused");
  EXPECT_TRUE(fs::is_directory(folder_ / "sub"));
  EXPECT_TRUE(fs::is_fifo(folder_ / "pipe"));
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
  EXPECT_THAT(names(), ElementsAre("pipe", "sub"));
}

TEST_F(File, AFolderIsReplacedWhole) {
  const fs::path path = folder_ / "checkpoint";
  write_folder_atomic(path, [](const fs::path& folder) {
    put(folder / "a", "1");
    put(folder / "b", "2");
  });
  write_folder_atomic(path / "", [](const fs::path& folder) { put(folder / "c", "3"); });
  EXPECT_FALSE(fs::exists(path / "a")) << "the old content is gone";
  EXPECT_EQ(read_file(path / "c"), "3");
  EXPECT_THAT(names(), ElementsAre("checkpoint"));
}

TEST_F(File, AFailedFillLeavesTheOldFolder) {
  const fs::path path = folder_ / "checkpoint";
  write_folder_atomic(path, [](const fs::path& folder) { put(folder / "a", "1"); });
  const auto fail = [](const fs::path& folder) {
    put(folder / "b", "2");
    throw std::runtime_error("interrupted");
  };
  EXPECT_THROW(write_folder_atomic(path, fail), std::runtime_error);
  EXPECT_EQ(read_file(path / "a"), "1");
  EXPECT_FALSE(fs::exists(path / "b"));
  EXPECT_THROW(write_folder_atomic(folder_ / "other", fail), std::runtime_error);
  EXPECT_THAT(names(), ElementsAre("checkpoint"));
}

TEST_F(File, AFolderDoesNotReplaceAFile) {
  put(folder_ / "notes.txt", "mine");
  bool filled = false;
  const std::string message = refusal(
      [&] { write_folder_atomic(folder_ / "notes.txt", [&](const fs::path&) { filled = true; }); });
  EXPECT_THAT(message, HasSubstr("notes.txt"));
  EXPECT_FALSE(filled);
  EXPECT_EQ(read_file(folder_ / "notes.txt"), "mine");
  EXPECT_THAT(names(), ElementsAre("notes.txt"));
}

TEST_F(File, MakesFoldersWithTheirParents) {
  make_folder(folder_ / "x" / "y");
  make_folder(folder_ / "x" / "y");
  EXPECT_TRUE(fs::is_directory(folder_ / "x" / "y"));
  put(folder_ / "file", "");
  EXPECT_THAT(refusal([&] { make_folder(folder_ / "file"); }), HasSubstr("file"));
  EXPECT_THAT(refusal([&] { make_folder(folder_ / "file" / "z"); }), HasSubstr("file"));
}

}  // namespace
}  // namespace twell
