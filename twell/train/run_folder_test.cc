// SPDX-License-Identifier: Apache-2.0
#include "twell/train/run_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/train/test_run.h"

namespace twell {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

std::string refusal(const fs::path& path, bool resume) {
  try {
    RunFolder folder(path, resume);
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}

void fill(const fs::path& folder) { std::ofstream(folder / "weights") << "w"; }

TEST(RunFolder, OneProcessAtATime) {
  const TempFolder temp;
  const RunFolder folder(temp.path() / "run", false);
  EXPECT_THAT(refusal(temp.path() / "run", false), HasSubstr("another process"));
}

TEST(RunFolder, AFolderInUseNeedsResumeAndResumeNeedsARun) {
  const TempFolder temp;
  const fs::path out = temp.path() / "run";
  EXPECT_THAT(refusal(out, true), HasSubstr("nothing to resume"));
  EXPECT_FALSE(fs::exists(out));
  EXPECT_EQ(refusal(out, false), "accepted");
  EXPECT_EQ(refusal(out, false), "accepted");  // begin() was not called
  {
    const RunFolder folder(out, false);
    EXPECT_FALSE(folder.begins_again());
    folder.begin("{}");
  }
  // A run that was ended before its first checkpoint begins again either way.
  for (const bool resume : {false, true}) {
    const RunFolder folder(out, resume);
    EXPECT_TRUE(folder.begins_again());
    EXPECT_FALSE(folder.resume_point({}));
  }
  RunFolder(out, true).save(1, 1, fill);
  EXPECT_THAT(refusal(out, false), HasSubstr("--resume"));
  EXPECT_EQ(refusal(out, true), "accepted");
  // The checkpoints are lost, which begin again would hide.
  fs::remove_all(out / "checkpoints");
  EXPECT_THAT(refusal(out, false), HasSubstr("--resume"));
  EXPECT_THROW(RunFolder(out, true).resume_point({}), InputError);
  std::ofstream(temp.path() / "file") << "x";
  EXPECT_THAT(refusal(temp.path() / "file", false), HasSubstr("file"));
}

TEST(RunFolder, AnEmptyPathNamesNoFolder) {
  const TempFolder temp;
  const fs::path before = fs::current_path();
  fs::current_path(temp.path());
  make_folder("checkpoint");
  std::ofstream("checkpoint/config.json") << "{}";
  EXPECT_EQ(checkpoint_folder(""), "");
  EXPECT_EQ(checkpoint_folder("."), "./checkpoint");
  EXPECT_EQ(checkpoint_folder("checkpoint"), "checkpoint");
  EXPECT_THAT(refusal("", false), HasSubstr("--out"));
  fs::current_path(before);
}

TEST(RunFolder, KeepsTheNewestAndLinksToTheLast) {
  const TempFolder temp;
  const RunFolder folder(temp.path(), false);
  EXPECT_FALSE(folder.latest());
  for (const int64_t step : {2, 9, 10, 1'000'000}) folder.save(step, 2, fill);
  EXPECT_EQ(folder.latest()->step, 1'000'000);
  EXPECT_EQ(fs::read_symlink(folder.link_path()), "checkpoints/step-1000000");
  EXPECT_TRUE(fs::exists(folder.link_path() / "weights"));
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(temp.path() / "checkpoints")) {
    names.insert(entry.path().filename().string());
  }
  EXPECT_EQ(names, (std::set<std::string>{"step-000010", "step-1000000"}));
  folder.discard_after(10);
  EXPECT_EQ(folder.latest()->step, 10);
  EXPECT_TRUE(fs::exists(folder.link_path() / "weights"));
}

TEST(RunFolder, AFailedSaveChangesNothing) {
  const TempFolder temp;
  const RunFolder folder(temp.path(), false);
  folder.save(1, 1, fill);
  EXPECT_THROW(folder.save(2, 1,
                           [](const fs::path& path) {
                             fill(path);
                             throw InputError("no space left");
                           }),
               InputError);
  EXPECT_EQ(folder.latest()->step, 1);
  EXPECT_EQ(fs::read_symlink(folder.link_path()), "checkpoints/step-000001");
  EXPECT_EQ(std::distance(fs::directory_iterator(temp.path() / "checkpoints"), {}), 1);
}

TEST(RunFolder, LeftoversOfAKilledProcessAreRemovedAndNeverTakenForCheckpoints) {
  const TempFolder temp;
  { RunFolder(temp.path(), false).save(3, 2, fill); }
  make_folder(temp.path() / "checkpoints" / ".step-000004.tmp.123");
  make_folder(temp.path() / "checkpoints" / "step-other");
  const RunFolder folder(temp.path(), true);
  EXPECT_EQ(folder.latest()->step, 3);
  EXPECT_FALSE(fs::exists(temp.path() / "checkpoints" / ".step-000004.tmp.123"));
}

}  // namespace
}  // namespace twell
