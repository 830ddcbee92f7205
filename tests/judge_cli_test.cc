// SPDX-License-Identifier: Apache-2.0
// twell eval --tasks and twell inspect as a user runs them, on the model of the golden tasks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "tests/test_command.h"
#include "twell/data/test_files.h"

namespace twell {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::HasSubstr;

class JudgeCli : public CommandTest {
 protected:
  static std::vector<std::string> eval(const std::string& tasks, const std::string& data,
                                       const std::vector<std::string>& more = {}) {
    std::vector<std::string> words = {"eval",    "--checkpoint", golden("tasks/model"),
                                      "--tasks", tasks,          "--task-data",
                                      data,      "--threads",    "1"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
};

TEST_F(JudgeCli, TasksAsTableAndJson) {
  const Result table = run(eval("arc_easy,winogrande", golden("tasks/data"), {"--out", "out"}));
  ASSERT_EQ(table.code, 0) << table.err;
  EXPECT_THAT(table.out, HasSubstr("acc_norm %"));
  EXPECT_THAT(table.out, testing::ContainsRegex("arc_easy +3 +0.00 ± 0.00 +33.33 ± 33.33"));
  EXPECT_THAT(table.out, testing::ContainsRegex("winogrande +3 +33.33 ± 33.33 +-"));
  EXPECT_THAT(table.err, HasSubstr("winogrande  3/3 items"));
  const json kept = json::parse(slurp(folder_ / "out" / "results.json"));
  EXPECT_DOUBLE_EQ(kept["tasks"]["winogrande"]["acc"].get<double>(), 1.0 / 3.0);
  EXPECT_FALSE(kept["tasks"]["winogrande"].contains("acc_norm"));
  EXPECT_EQ(kept["tasks"]["arc_easy"]["items"], 3);
  const Result printed =
      run(eval("arc_easy,winogrande", golden("tasks/data"), {"--out", "out", "--json"}));
  EXPECT_EQ(json::parse(printed.out), kept);
  const Result one = run(eval("piqa", golden("tasks/data"), {"--limit", "1", "--json"}));
  EXPECT_TRUE(json::parse(one.out)["tasks"]["piqa"]["acc_stderr"].is_null());
}

TEST_F(JudgeCli, ParquetGivesTheSameScores) {
  const json lines = json::parse(run(eval("arc_easy,piqa", golden("tasks/data"), {"--json"})).out);
  const Result result = run(eval("arc_easy,piqa", golden("tasks/parquet"), {"--json"}));
  ASSERT_EQ(result.code, 0) << result.err;
  const json rows = json::parse(result.out);
  EXPECT_EQ(rows["mean_acc"], lines["mean_acc"]);
  EXPECT_EQ(rows["mean_acc_norm"], lines["mean_acc_norm"]);
  EXPECT_THAT(rows["tasks"]["arc_easy"]["file"].get<std::string>(),
              testing::EndsWith("ARC-Easy/test-00000-of-00001.parquet"));
}

TEST_F(JudgeCli, StoppedTasksContinueToTheSameScores) {
  std::string items;
  for (int i = 0; i < 1500; ++i) {
    items += json{{"goal", "count to " + std::to_string(i)},
                  {"sol1", "say " + std::string(static_cast<size_t>(i % 40), 'a')},
                  {"sol2", "write " + std::to_string(i * i)},
                  {"label", i % 2}}
                 .dump() +
             "\n";
  }
  write("piqa.jsonl", items);
  ASSERT_EQ(run(eval("piqa", ".", {"--out", "whole"})).code, 0);
  int stopped = 0;
  for (int i = 0; i < 50; ++i) {
    const pid_t child = start(eval("piqa", ".", {"--out", "part"}));
    // The delays range from just after the signal handler is installed to after several batches.
    std::this_thread::sleep_for(std::chrono::milliseconds(200 + 100 * i));
    ::kill(child, i % 2 == 0 ? SIGTERM : SIGKILL);
    const Result result = finish(child);
    if (result.code == 0) break;
    ++stopped;
    if (result.code == 128 + SIGTERM && !result.err.empty()) {
      EXPECT_THAT(result.err, HasSubstr("the same command continues"));
    }
  }
  EXPECT_GT(stopped, 0);
  ASSERT_EQ(run(eval("piqa", ".", {"--out", "part"})).code, 0);
  for (const char* file : {"piqa.jsonl", "results.json"}) {
    EXPECT_EQ(slurp(folder_ / "part" / file), slurp(folder_ / "whole" / file)) << file;
  }
}

TEST_F(JudgeCli, BadTasks) {
  expect_refused(eval("piqa,mmlu", golden("tasks/data")), "unknown task 'mmlu'");
  expect_refused(eval("piqa,piqa", golden("tasks/data")), "named twice");
  expect_refused(eval("piqa", "missing"), "missing is not a folder");
  expect_refused(eval("piqa", "."), "no items of piqa");
  expect_refused(eval("piqa", golden("tasks/data"), {"--batch-tokens", "-1"}),
                 "at least one token");
  expect_refused(eval("piqa", golden("tasks/data"), {"--limit", "-1"}), "--limit");
  expect_refused(eval("piqa", golden("tasks/data"), {"--ffn", "fast"}), "fast");
  expect_refused(eval("piqa", golden("tasks/data"), {"--data", "x"}),
                 "--data cannot be combined with --tasks");
  expect_refused({"eval", "--checkpoint", golden("tasks/model"), "--tasks", "piqa"}, "--task-data");
  write("piqa.jsonl", "{\"goal\": \"g\", \"sol1\": \"a\", \"label\": 0}\n");
  expect_refused(eval("piqa", "."), "piqa.jsonl line 1 has no \"sol2\"");
  write("winogrande/validation-00000-of-00001.parquet", "PAR1");
  expect_refused(eval("winogrande", "."), "is not a Parquet file");
}

// The labels of a chart's vertical axis, from below.
std::vector<std::string> labels_of_axis(const std::string& svg) {
  const std::string before = "text-anchor='end'>";
  std::vector<std::string> labels;
  for (size_t at = svg.find(before); at != std::string::npos; at = svg.find(before, at)) {
    at += before.size();
    labels.push_back(svg.substr(at, svg.find('<', at) - at));
  }
  return labels;
}

TEST_F(JudgeCli, InspectAsTableJsonAndPage) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += "The cork <floats> & the stone sinks " + std::to_string(i);
  write("text.txt", text);
  const std::vector<std::string> words = {
      "inspect", "--checkpoint", golden("tasks/model"), "--data", "text.txt", "--threads", "1"};
  const auto with = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all = words;
    all.insert(all.end(), more.begin(), more.end());
    return run(all);
  };
  const Result result = with({"--json", "i.json", "--html", "i.html"});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("union 128"));
  EXPECT_THAT(result.out, HasSubstr("least active tokens"));

  const json report = json::parse(slurp(folder_ / "i.json"));
  ASSERT_EQ(report["layers"].size(), 2u);
  for (const json& layer : report["layers"]) {
    EXPECT_LE(layer["nnz_mean"], layer["union_64"]);
    EXPECT_LE(layer["union_64"], layer["union_128"]);
    EXPECT_LE(layer["union_128"].get<double>() + layer["never_fired"].get<double>(), 48.0);
    EXPECT_GE(layer["prompt"]["ffn_speedup"], 1.0);
  }
  EXPECT_EQ(report["positions"].back()["last"], 95);
  EXPECT_GE(report["most_active_tokens"][0]["nnz_mean"],
            report["least_active_tokens"][0]["nnz_mean"]);
  EXPECT_EQ(json::parse(with({"--json"}).out), report);

  const std::string page = slurp(folder_ / "i.html");
  EXPECT_EQ(static_cast<size_t>(std::count(page.begin(), page.end(), '<')),
            static_cast<size_t>(std::count(page.begin(), page.end(), '>')));
  // The first chart's axis is logarithmic and ends at the power of ten above the busiest of 48
  // neurons.
  const size_t chart = page.find("<svg");
  ASSERT_NE(chart, std::string::npos);
  EXPECT_THAT(labels_of_axis(page.substr(chart, page.find("</svg>", chart) - chart)),
              testing::ElementsAre("1", "10", "100"));
  for (const char* outside :
       {"http:", "https:", "<script", "src=", "href=", "@import", "url(", "nan", "inf"}) {
    EXPECT_THAT(page, testing::Not(HasSubstr(outside)));
  }
  const Result plain = run({"inspect", "--checkpoint", golden("tasks/model"), "--html", "p.html"});
  EXPECT_EQ(plain.code, 0) << plain.err;
  EXPECT_THAT(slurp(folder_ / "p.html"), HasSubstr("parameters"));
}

}  // namespace
}  // namespace twell
