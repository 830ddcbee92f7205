// SPDX-License-Identifier: Apache-2.0
#include "twell/tasks/task_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/data/test_files.h"

namespace twell {
namespace {

using testing::HasSubstr;

constexpr const char* kItem = R"({"goal": "g", "sol1": "a", "sol2": "b", "label": 1})"
                              "\n";
constexpr const char* kUnlabelled = R"({"goal": "g", "sol1": "a", "sol2": "b"})"
                                    "\n";

std::string fault(const TempFolder& folder) {
  try {
    load_task(find_task("piqa"), folder.path());
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

TEST(TaskFile, LinesBlankLinesAndTheLimit) {
  const TempFolder folder;
  folder.write("piqa.jsonl",
               std::string("\xEF\xBB\xBF") + kItem + "\n  \r\n" + kItem + kUnlabelled);
  const TaskData two = load_task(find_task("piqa"), folder.path(), 2);
  ASSERT_EQ(two.items.size(), 2u);
  EXPECT_EQ(two.items[1].line, 4);
  EXPECT_EQ(load_task(find_task("piqa"), folder.path(), 1).items.size(), 1u);
  EXPECT_NE(load_task(find_task("piqa"), folder.path(), 1).hash, two.hash);
  EXPECT_THAT(fault(folder), HasSubstr("piqa.jsonl line 5 has no \"label\""));
}

TEST(TaskFile, CompressedAndWithLabelsBesideIt) {
  const TempFolder folder;
  folder.write("piqa/valid.jsonl.gz", gzip(std::string(kUnlabelled) + kUnlabelled));
  folder.write("piqa/valid-labels.lst", "0\n1");
  const TaskData data = load_task(find_task("piqa"), folder.path());
  ASSERT_EQ(data.items.size(), 2u);
  EXPECT_EQ(data.items[0].gold, 0);
  EXPECT_EQ(data.items[1].gold, 1);
}

TEST(TaskFile, ParquetByEveryNameOfTheHub) {
  const std::filesystem::path golden = std::filesystem::path(TWELL_SOURCE_DIR) / "tests/golden";
  const std::string file =
      read_file(golden / "tasks/parquet/piqa/plain_text/validation-00000-of-00001.parquet");
  for (const char* name :
       {"piqa.parquet", "piqa/validation-00000-of-00001.parquet",
        "piqa/data/validation-00000-of-00001.parquet", "piqa/plain_text/validation/0000.parquet"}) {
    const TempFolder folder;
    folder.write(name, file);
    EXPECT_EQ(load_task(find_task("piqa"), folder.path()).items.size(), 3u) << name;
  }
  // The rows belong to another data set.
  const TempFolder folder;
  folder.write("winogrande.parquet", file);
  try {
    load_task(find_task("winogrande"), folder.path());
    FAIL();
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr("winogrande.parquet row 1 has no \"sentence\""));
  }
}

TEST(TaskFile, FaultsNameTheFileAndTheLine) {
  const TempFolder folder;
  EXPECT_THAT(fault(folder), HasSubstr("looked for piqa.jsonl (or .gz, .xz, .zst of it), "
                                       "piqa.parquet, and validation.jsonl or "
                                       "validation-00000-of-00001.parquet in piqa, piqa/data"));
  folder.write("piqa/validation-00000-of-00001.parquet", "PAR1");
  EXPECT_THAT(fault(folder), HasSubstr("-00001.parquet is not a Parquet file, or a part of one"));
  folder.write("piqa.jsonl", "");
  EXPECT_THAT(fault(folder), HasSubstr("piqa.jsonl holds no items"));
  folder.write("piqa.jsonl", std::string(kItem) + "{\"goal\": \n");
  EXPECT_THAT(fault(folder), HasSubstr("piqa.jsonl line 2: not valid JSON"));
  folder.write("piqa.jsonl", std::string(kItem) + "\"text\"\n");
  EXPECT_THAT(fault(folder), HasSubstr("piqa.jsonl line 2 is not an object"));
  folder.write("piqa.jsonl", "\xFF\xFE\n");
  EXPECT_THAT(fault(folder), HasSubstr("piqa.jsonl line 1"));
  folder.write("piqa.jsonl", std::string(size_t{20} << 20, 'x'));
  EXPECT_THAT(fault(folder), HasSubstr("piqa.jsonl line 1 is longer than 16 MiB"));
  EXPECT_THROW(load_task(find_task("piqa"), folder.path() / "missing"), InputError);
}

}  // namespace
}  // namespace twell
