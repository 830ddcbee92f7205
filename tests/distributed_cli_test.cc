// SPDX-License-Identifier: Apache-2.0
// Training with several processes: resuming with another number of them, and what happens when one
// is killed, stopped or interrupted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

#include "tests/test_command.h"
#include "twell/dist/rank_identity.h"

namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using twell::slurp;

class DistributedTest : public twell::CommandTest {
 protected:
  void SetUp() override {
    fs::create_directory(folder_ / "text");
    for (int i = 0; i < 12; ++i) {
      std::ofstream file(folder_ / "text" / (std::to_string(i) + ".txt"));
      for (int j = 0; j < 200; ++j) {
        file << "note " << j << ": the value of item " << i * j << " is " << j % 7 << "\n";
      }
    }
  }

  // Four micro-batches a step.
  static std::vector<std::string> train(const std::string& out,
                                        const std::vector<std::string>& more = {}) {
    std::vector<std::string> words = {"train", "--data",           "text", "--out",
                                      out,     "--width",          "16",   "--ffn",
                                      "48",    "--layers",         "1",    "--heads",
                                      "2",     "--context",        "16",   "--vocab-size",
                                      "300",   "--micro-batch",    "2",    "--batch-tokens",
                                      "128",   "--validate-every", "0",    "--save-every",
                                      "4",     "--warmup-steps",   "2",    "--threads",
                                      "1"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  int64_t lines(const std::string& run) const {
    const std::string metrics = slurp(folder_ / run / "metrics.jsonl");
    return std::count(metrics.begin(), metrics.end(), '\n');
  }
  void wait_for_lines(const std::string& run, int64_t count) const {
    for (int i = 0; i < 4000 && lines(run) < count; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  // The process of a rank, from the launcher's first line: "ranks: 3 processes, 12 13 14".
  pid_t process(int rank) const {
    std::string line;
    for (int i = 0; i < 2000 && line.empty(); ++i) {
      std::istringstream text(slurp(folder_ / "stdout"));
      if (!std::getline(text, line) || text.eof()) line.clear();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    std::istringstream words(line.substr(std::min(line.size(), line.find(", ") + 2)));
    pid_t id = -1;
    for (int i = 0; i <= rank; ++i) words >> id;
    return id;
  }
  // The training losses of a run.
  std::vector<double> curve(const std::string& run) const {
    std::vector<double> losses;
    std::istringstream metrics(slurp(folder_ / run / "metrics.jsonl"));
    for (std::string line; std::getline(metrics, line);) {
      losses.push_back(std::stod(line.substr(line.find("\"ce\":") + 5)));
    }
    return losses;
  }
};

TEST_F(DistributedTest, ProcessesTrainAndAnyNumberOfThemContinues) {
  ASSERT_EQ(run(train("one", {"--steps", "16"})).code, 0);
  const Result two = run(train("two", {"--steps", "16", "--ranks", "2"}));
  ASSERT_EQ(two.code, 0) << two.err;
  EXPECT_THAT(two.out, HasSubstr("2 ranks, CPU"));
  EXPECT_EQ(two.out.find("finished after 16"), two.out.rfind("finished after 16")) << two.out;
  EXPECT_EQ(two.err, "");
  for (const char* ranks : {"4", "1"}) {
    const Result more = run({"train", "--out", "two", "--resume", "--steps",
                             ranks == std::string("4") ? "20" : "24", "--ranks", ranks});
    ASSERT_EQ(more.code, 0) << more.err;
  }
  const std::vector<double> one = curve("one"), other = curve("two");
  ASSERT_EQ(one.size(), 16u);
  ASSERT_EQ(other.size(), 24u);
  // A longer run has another schedule, but only from its first step after 16 on.
  for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(other[i], one[i], 1e-3) << i;
  expect_refused(train("three", {"--ranks", "5"}), "too few for 5 ranks");
  expect_refused(train("three", {"--max-restarts", "1"}), "--max-restarts goes with");
}

TEST_F(DistributedTest, ALostProcessEndsTheRunWithItsRankAndStep) {
  const std::vector<std::string> options = {
      "--steps", "100000", "--ranks", "3", "--collective-timeout", "8"};
  for (const int signal : {SIGKILL, SIGSTOP}) {
    const std::string out = signal == SIGKILL ? "killed" : "stopped";
    fs::remove(folder_ / "stdout");
    const pid_t launcher = start(train(out, options));
    wait_for_lines(out, 6);
    const pid_t rank = process(1);
    ASSERT_GT(rank, 0);
    ASSERT_EQ(::kill(rank, signal), 0);
    const auto begin = std::chrono::steady_clock::now();
    const Result result = finish(launcher);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
    EXPECT_EQ(result.code, 1) << result.err;
    const std::string fault =
        signal == SIGKILL ? "rank 1 ended in step" : "rank 1 has not answered";
    // The two other ranks.
    EXPECT_NE(result.err.find(fault), result.err.rfind(fault)) << result.err;
    EXPECT_THAT(result.err, HasSubstr("the last good checkpoint is " + out));
    EXPECT_NE(::kill(rank, 0), 0) << "the rank still runs";
    const int64_t steps = lines(out);
    const Result resumed = run(
        {"train", "--out", out, "--resume", "--steps", std::to_string(steps + 5), "--ranks", "2"});
    EXPECT_EQ(resumed.code, 0) << resumed.err;
    EXPECT_EQ(lines(out), steps + 5);
  }
}

// A killed and resumed run prints the losses of an uninterrupted one, and its weights are the same
// bits, with all that a step depends on: schedules, activity, documents, reinitialised neurons.
TEST_F(DistributedTest, TheLauncherResumesByItself) {
  const std::vector<std::string> options = {"--steps",
                                            "40",
                                            "--ranks",
                                            "2",
                                            "--l1",
                                            "1e-2",
                                            "--l1-zero-steps",
                                            "5",
                                            "--l1-ramp-steps",
                                            "20",
                                            "--document-mask",
                                            "--ffn-policy",
                                            "hybrid",
                                            "--reinit-dead"};
  const Result whole = run(train("whole", options));
  ASSERT_EQ(whole.code, 0) << whole.err;
  std::vector<std::string> restarting = options;
  restarting.insert(restarting.end(), {"--max-restarts", "2"});
  fs::remove(folder_ / "stdout");
  const pid_t launcher = start(train("lost", restarting));
  wait_for_lines("lost", 10);
  ASSERT_EQ(::kill(process(0), SIGKILL), 0);
  const Result result = finish(launcher);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("restart 1 of 2"));
  EXPECT_EQ(curve("lost"), curve("whole"));
  const auto weights = [this](const char* run) {
    return slurp(folder_ / run / "checkpoint" / "model.safetensors");
  };
  EXPECT_TRUE(weights("lost") == weights("whole"));
}

TEST_F(DistributedTest, ADivergedRunIsNotRestarted) {
  // A weight decay that multiplies the weights by about -1,000 in every step.
  const Result result = run(train("run", {"--steps", "100", "--ranks", "2", "--lr", "10",
                                          "--weight-decay", "100", "--max-restarts", "3"}));
  EXPECT_EQ(result.code, 2) << result.err;
  EXPECT_THAT(result.err, HasSubstr("training diverged"));
  EXPECT_THAT(result.err, HasSubstr("on rank 0; lower the learning rate"));
  EXPECT_THAT(result.err, HasSubstr("the last good checkpoint is run"));
  EXPECT_EQ(result.err.find("restart"), std::string::npos) << result.err;
}

TEST_F(DistributedTest, ASignalToTheLauncherSaves) {
  const std::vector<std::string> options = {"--steps", "100000", "--ranks", "2"};
  const pid_t launcher = start(train("run", options));
  wait_for_lines("run", 6);
  ::kill(launcher, SIGTERM);
  const Result result = finish(launcher);
  EXPECT_EQ(result.code, 143) << result.err;
  EXPECT_THAT(result.out, HasSubstr("interrupted and saved"));
  EXPECT_EQ(
      run({"train", "--out", "run", "--resume", "--steps", std::to_string(lines("run") + 3)}).code,
      0);
}

TEST_F(DistributedTest, AnotherLaunchersProcessesFindEachOther) {
  // torchrun's variables, with its store on MASTER_PORT.
  const twell::LocalListener store;
  ::setenv("WORLD_SIZE", "2", 1);
  ::setenv("MASTER_ADDR", "localhost", 1);
  ::setenv("MASTER_PORT", std::to_string(store.port).c_str(), 1);
  ::setenv("TORCHELASTIC_RUN_ID", "test", 1);
  const std::vector<std::string> words = train("run", {"--steps", "6", "--device", "cpu"});
  std::vector<pid_t> children;
  for (const char* rank : {"1", "0"}) {
    ::setenv("RANK", rank, 1);
    ::setenv("LOCAL_RANK", rank, 1);
    children.push_back(start(words));
  }
  for (const char* name :
       {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK"}) {
    ::unsetenv(name);
  }
  for (const pid_t child : children) {
    const Result result = finish(child);
    EXPECT_EQ(result.code, 0) << result.err;
  }
  EXPECT_EQ(lines("run"), 6);
  EXPECT_TRUE(fs::exists(folder_ / "run" / "checkpoint" / "trainer" /
                         "optimizer-00001-of-00002.safetensors"));
}

}  // namespace
