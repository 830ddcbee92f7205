// SPDX-License-Identifier: Apache-2.0
#include "twell/train/metrics.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/train/test_run.h"

namespace twell {
namespace {

StepMetrics sample(int64_t step) {
  StepMetrics metrics;
  metrics.step = step;
  metrics.tokens = step * 1000;
  metrics.ce = 3.25;
  metrics.l1 = 20.0;
  metrics.l1_coeff = 0.0125;
  metrics.tokens_per_second = 8123;
  metrics.layers.resize(2);
  metrics.layers[0].nnz = 10.0;
  metrics.layers[1].nnz = 31.0;
  metrics.layers[1].dead_share = 0.5;
  metrics.layers[1].execution = FfnTrainExecution::kHybrid;
  return metrics;
}

std::vector<int64_t> steps_in(const std::filesystem::path& path) {
  std::vector<int64_t> steps;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    steps.push_back(nlohmann::json::parse(line).at("step").get<int64_t>());
  }
  return steps;
}

// A layer that keeps switching its execution is not reported; layers that settle share one line.
TEST(Metrics, ExecutionChangesAreToldOnceTheyLast) {
  constexpr auto kDense = FfnTrainExecution::kDense, kHybrid = FfnTrainExecution::kHybrid;
  ExecutionChanges changes;
  std::vector<std::string> lines;
  for (int64_t step = 1; step <= 200; ++step) {
    StepMetrics metrics = sample(step);
    metrics.layers.resize(3);
    metrics.layers[0].execution = step % 7 < 3 ? kHybrid : kDense;
    metrics.layers[1].execution = step < 50 ? kDense : kHybrid;
    metrics.layers[2].execution = step < 50 ? kDense : kHybrid;
    metrics.layers[2].nnz = 11.0;
    for (const std::string& line : changes.settled(metrics, 64)) lines.push_back(line);
  }
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0],
            "layers 1, 2: dense -> hybrid since step 50, with 21.0 of 64 neurons active per token");
}

TEST(Metrics, JsonHoldsStepAndLayers) {
  const nlohmann::json json = metrics_json(sample(4));
  EXPECT_EQ(json["step"], 4);
  EXPECT_DOUBLE_EQ(json["loss"].get<double>(), 3.5);
  EXPECT_DOUBLE_EQ(json["nnz"].get<double>(), 20.5);
  EXPECT_DOUBLE_EQ(json["dead_share"].get<double>(), 0.25);
  EXPECT_EQ(json["layers"].size(), 2u);
  EXPECT_EQ(json["layers"][1]["execution"], "hybrid");
  EXPECT_FALSE(json.contains("val_ce"));
  EXPECT_FALSE(json.contains("mfu"));
  EXPECT_FALSE(json["layers"][0].contains("union"));
}

TEST(Metrics, JsonHoldsWhatOnlyADeviceCounts) {
  StepMetrics metrics = sample(4);
  metrics.mfu = 0.5;
  metrics.device_bytes = 4096;
  metrics.layers[0].union_neurons = 17.5;
  metrics.layers[0].recomputed = 2;
  const nlohmann::json json = metrics_json(metrics);
  EXPECT_DOUBLE_EQ(json["mfu"].get<double>(), 0.5);
  EXPECT_EQ(json["device_bytes"], 4096);
  EXPECT_DOUBLE_EQ(json["layers"][0]["union"].get<double>(), 17.5);
  EXPECT_EQ(json["layers"][0]["recomputed"], 2);
  EXPECT_FALSE(json["layers"][1].contains("recomputed"));
}

TEST(Metrics, JsonHoldsTextsOfTheModel) {
  StepMetrics metrics = sample(4);
  EXPECT_FALSE(metrics_json(metrics).contains("samples"));
  metrics.samples = {{"a", "b\n\"c\""}, {"", "d"}};
  const nlohmann::json json = metrics_json(metrics);
  EXPECT_EQ(json["samples"].dump(),
            R"([{"prompt":"a","text":"b\n\"c\""},{"prompt":"","text":"d"}])");
}

TEST(Metrics, BeforeTheFirstStepOnlyValidation) {
  StepMetrics metrics;
  metrics.validation_ce = 9.5;
  EXPECT_EQ(metrics_json(metrics).dump(), R"({"step":0,"tokens":0,"val_ce":9.5})");
}

TEST(Metrics, ResumingCutsOffLaterStepsAndATornLine) {
  const TempFolder folder;
  const auto path = folder.path() / "metrics.jsonl";
  {
    MetricsWriter writer(path, 0);
    for (int64_t step = 1; step <= 5; ++step) writer.write(sample(step));
  }
  std::ofstream(path, std::ios::app) << R"({"step":6,"tok)";
  {
    MetricsWriter writer(path, 5);
    writer.write(sample(6));
  }
  EXPECT_EQ(steps_in(path), (std::vector<int64_t>{1, 2, 3, 4, 5, 6}));
  {
    MetricsWriter writer(path, 3);
    writer.write(sample(4));
  }
  EXPECT_EQ(steps_in(path), (std::vector<int64_t>{1, 2, 3, 4}));
}

TEST(Metrics, DamagedLinesAreReportedAndWhatStandsBehindThemStays) {
  const TempFolder folder;
  const auto path = folder.path() / "metrics.jsonl";
  std::string text;
  for (int64_t step = 1; step <= 6; ++step) text += metrics_json(sample(step)).dump() + "\n";
  const size_t third = text.find("\"step\":3");
  text[text.rfind('{', third)] = '\0';
  std::ofstream(path, std::ios::binary) << text;
  std::vector<std::string> log;
  const LogSink sink = [&](LogLevel, std::string_view line) { log.emplace_back(line); };
  const auto rows = read_json_lines(path, sink);
  ASSERT_EQ(rows.size(), 5u);
  EXPECT_EQ(rows[2]["step"], 4);
  ASSERT_EQ(log.size(), 1u);
  EXPECT_NE(log[0].find("metrics.jsonl: line 3 is damaged"), std::string::npos) << log[0];
  {
    MetricsWriter writer(path, 5, sink);
    writer.write(sample(6));
  }
  EXPECT_EQ(log.size(), 2u);
  const auto kept = read_json_lines(path, {});
  ASSERT_EQ(kept.size(), 5u);
  EXPECT_EQ(kept.back()["step"], 6);
  EXPECT_EQ(std::filesystem::file_size(path), text.size());
}

// At 80 columns figures are left out as a whole.
TEST(Metrics, TheProgressLineFitsItsTerminal) {
  StepMetrics metrics = sample(12345);
  metrics.tokens = 123'456'789;
  metrics.tokens_per_second = 8123;
  metrics.mfu = 0.41;
  metrics.device_bytes = int64_t{18} << 30;
  const std::string whole = format_progress(metrics, 40000, 3.301, 11000);
  EXPECT_NE(whole.find("  123M tok"), std::string::npos) << whole;
  for (size_t columns = 200; columns >= 70; --columns) {
    const std::string line = format_progress(metrics, 40000, 3.301, 11000, columns);
    EXPECT_LE(line.size(), columns);
    // What is shown is a part of the whole, and its last figure is complete.
    const std::string last = line.substr(line.rfind(line.size() < whole.size() ? " " : "  ") + 1);
    EXPECT_NE((whole + "  ").find(last), std::string::npos) << line;
    EXPECT_NE(line.find("nnz"), std::string::npos) << line;
  }
}

TEST(Metrics, AFullDiskIsReportedAndLosesNothing) {
  const TempFolder folder;
  const std::filesystem::path path = folder.path() / "metrics.jsonl";
  MetricsWriter writer(path, 0);
  // A file size limit makes writes fail like a full disk.
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit tight{64, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &tight), 0);
  std::string message;
  try {
    writer.write(sample(1));
  } catch (const InputError& error) {
    message = error.what();
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_NE(message.find("metrics.jsonl"), std::string::npos) << message;
  writer.write(sample(2));
  EXPECT_EQ(steps_in(path), (std::vector<int64_t>{1, 2}));
}

TEST(Format, Numbers) {
  EXPECT_EQ(format_count(0), "0.00");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1234567), "1.23M");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_duration(59.2), "59s");
  EXPECT_EQ(format_duration(192), "3m12s");
  EXPECT_EQ(format_duration(3912), "1h05m");
  EXPECT_EQ(format_duration(200000), "2d07h");
}

TEST(Format, ProgressLine) {
  EXPECT_EQ(format_progress(sample(120), 1000, 3.5, 192),
            "step 120/1000  ETA 3m12s  8.12k tok/s  CE 3.250  val 3.500  nnz 20.5  dead 25%  "
            "hybrid 1/2  L1 20.0  120k tok");
  StepMetrics on_device = sample(120);
  on_device.mfu = 0.412;
  on_device.device_bytes = int64_t{3} << 30;
  EXPECT_EQ(format_progress(on_device, 1000, {}, -1),
            "step 120/1000  8.12k tok/s  CE 3.250  nnz 20.5  dead 25%  hybrid 1/2  L1 20.0  "
            "MFU 41%  3.00 GiB  120k tok");
}

}  // namespace
}  // namespace twell
