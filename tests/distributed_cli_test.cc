// SPDX-License-Identifier: Apache-2.0
// Training with several processes: resuming with another number of them, and what happens when one
// is killed, stopped or interrupted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>

#include "tests/test_command.h"
#include "twell/dist/rank_identity.h"
#include "twell/dist/rendezvous.h"

namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using twell::slurp;

class DistributedTest : public twell::RunTest {
 protected:
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
  int64_t option(const std::string& run, const std::string& name) const {
    const std::string options = slurp(folder_ / run / "options.json");
    const size_t at = options.find("\"" + name + "\": \"");
    return at == std::string::npos ? -1 : std::stoll(options.substr(at + name.size() + 5));
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
  static std::string log_of(int rank) { return "log" + std::to_string(rank); }
  // torchrun's variables of one rank of two.
  static std::vector<std::string> torchrun(int rank, std::vector<std::string> more) {
    more.insert(more.end(), {"WORLD_SIZE=2", "RANK=" + std::to_string(rank)});
    return more;
  }
  // A process for a rank as a launcher starts it: with `environment`, under the command `under` if
  // there is one. Its output goes to the file log_of(rank).
  pid_t start_rank(int rank, std::vector<std::string> under,
                   const std::vector<std::string>& environment,
                   const std::vector<std::string>& words) const {
    std::vector<std::string> command = std::move(under);
    command.push_back("env");
    command.insert(command.end(), environment.begin(), environment.end());
    command.push_back(TWELL_BINARY);
    command.insert(command.end(), words.begin(), words.end());
    std::vector<char*> argv;
    for (std::string& word : command) argv.push_back(word.data());
    argv.push_back(nullptr);
    const std::string log = log_of(rank);
    const pid_t child = ::fork();
    if (child == 0) {
      if (::chdir(folder_.c_str()) != 0 || std::freopen(log.c_str(), "w", stdout) == nullptr) {
        ::_exit(126);
      }
      ::dup2(STDOUT_FILENO, STDERR_FILENO);
      ::execvp(argv[0], argv.data());
      ::_exit(127);
    }
    return child;
  }
  // Expects both ranks of a run to end with this exit code; returns what they wrote.
  std::array<std::string, 2> finish_ranks(const std::array<pid_t, 2>& ranks, int code) const {
    std::array<std::string, 2> logs;
    for (const int rank : {0, 1}) {
      const auto at = static_cast<size_t>(rank);
      const int ended = finish(ranks[at]).code;
      logs[at] = slurp(folder_ / log_of(rank));
      EXPECT_EQ(ended, code) << logs[at];
    }
    return logs;
  }
  // Expects every rank to end within moments with one line: the one that refuses something with
  // exit code 2, the others with exit code 1 and its number.
  void expect_all_end(const std::vector<pid_t>& ranks, int refusing, const std::string& fault) {
    const auto begin = std::chrono::steady_clock::now();
    for (size_t at = 0; at < ranks.size(); ++at) {
      const int rank = static_cast<int>(at);
      if (ranks[at] < 0) continue;  // not a process
      const int code = finish(ranks[at]).code;
      const std::string log = slurp(folder_ / log_of(rank));
      EXPECT_EQ(code, rank == refusing ? 2 : 1) << log;
      EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
      const std::string who = "rank " + std::to_string(refusing) + " failed in step 0: ";
      EXPECT_THAT(log,
                  testing::StartsWith("twell: error: " + (rank == refusing ? "" : who) + fault));
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  }
  // Two ranks with torchrun's variables, whose store is on MASTER_PORT.
  std::array<std::string, 2> run_by_hand(const std::vector<std::string>& first,
                                         const std::vector<std::string>& second, int code) const {
    const twell::LocalListener store;
    const auto start = [&](int rank, const std::vector<std::string>& words) {
      return start_rank(
          rank, {},
          torchrun(rank, {"LOCAL_RANK=" + std::to_string(rank), "MASTER_ADDR=localhost",
                          "MASTER_PORT=" + std::to_string(store.port), "TORCHELASTIC_RUN_ID=test"}),
          words);
    };
    const pid_t one = start(1, second);
    return finish_ranks({start(0, first), one}, code);
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

// Ranks that were not started alike end before the first step, each with a line that names the
// difference.
TEST_F(DistributedTest, RanksWithOtherOptionsAreRefused) {
  const auto expect_both_refuse = [this](const std::vector<std::string>& first,
                                         const std::vector<std::string>& second,
                                         const std::string& fault) {
    for (const std::string& log : run_by_hand(first, second, 2)) {
      EXPECT_THAT(log, HasSubstr("twell: error: "));
      EXPECT_THAT(log, HasSubstr(fault));
      EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
    }
  };
  const std::vector<std::string> cpu = {"--device", "cpu", "--steps", "6"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), cpu.begin(), cpu.end());
    return train("run", more);
  };
  expect_both_refuse(with({"--seed", "1"}), with({"--seed", "2"}),
                     "the ranks differ: rank 1: --seed: 2, on rank 0: 1; start all of them alike");
  expect_both_refuse(with({}), with({"--l1", "0.5"}), "rank 1: --l1: 0.5, on rank 0: not given");
  // The paths of a shared folder may differ, but both must see the same one.
  fs::create_directory_symlink("run", folder_ / "link");
  std::vector<std::string> elsewhere = train("link", cpu);
  run_by_hand(with({}), elsewhere, 0);
  fs::remove_all(folder_ / "run");
  fs::create_directory(folder_ / "own");
  elsewhere = train("own", cpu);
  expect_both_refuse(with({}), elsewhere,
                     "/own is not the folder that rank 0 sees there: put it on a file system that "
                     "all machines share");
}

// What one rank refuses ends the others too: before it has met them, while they connect (Gloo
// cannot be interrupted while it waits for a rank that has ended), and afterwards.
TEST_F(DistributedTest, WhatOneRankRefusesEndsAllWithinMoments) {
  const twell::LocalListener store;
  const auto variables = [&](int rank, int ranks) {
    return std::vector<std::string>{"RANK=" + std::to_string(rank),
                                    "WORLD_SIZE=" + std::to_string(ranks), "MASTER_ADDR=localhost",
                                    "MASTER_PORT=" + std::to_string(store.port),
                                    "TORCHELASTIC_RUN_ID=test"};
  };
  const auto start = [&](int rank, int ranks, const std::vector<std::string>& more) {
    std::vector<std::string> words = train("run", {"--device", "cpu"});
    std::replace(words.begin(), words.end(), std::string("128"), std::string("256"));
    words.insert(words.end(), more.begin(), more.end());
    return start_rank(rank, {}, variables(rank, ranks), words);
  };
  expect_all_end({start(0, 2, {"--data", "missing"}), start(1, 2, {})}, 0, "cannot read missing");
  expect_all_end({start(0, 2, {}), start(1, 2, {"--relufy"})}, 1, "--relufy and --distill start");
  // Rank 1 is this test.
  std::vector<pid_t> ranks;
  for (const int rank : {0, 1, 2, 3, 4, 5, 6}) ranks.push_back(rank == 1 ? -1 : start(rank, 7, {}));
  {
    const std::vector<std::string> mine = variables(1, 7);
    const auto identity = twell::rank_identity([&](const char* name) -> const char* {
      for (const std::string& variable : mine) {
        if (variable.starts_with(std::string(name) + "=")) {
          return variable.c_str() + std::strlen(name) + 1;
        }
      }
      return nullptr;
    });
    twell::Rendezvous rendezvous(*identity, std::chrono::seconds(60));
    rendezvous.put("gloo/rank_1", "host");  // without it Gloo connects none
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    rendezvous.fail("unfit");
  }
  expect_all_end(ranks, 1, "unfit");
  fs::create_directory(folder_ / "run");
  write("run/options.json", "{}");
  fs::create_directories(folder_ / "run/checkpoints/step-000001");
  expect_all_end({start(0, 2, {}), start(1, 2, {})}, 0, "run already holds a training run");
}

// Two machines: network namespaces with a pair of virtual interfaces, whose cable is pulled.
class HostsTest : public DistributedTest {
 protected:
  void SetUp() override {
    DistributedTest::SetUp();
    const std::string id = std::to_string(::getpid());
    for (std::string& host : hosts_) host += id;
    const auto all = [&](const std::vector<std::string>& commands) {
      return std::all_of(commands.begin(), commands.end(), [](const std::string& command) {
        return std::system((command + " 2>/dev/null").c_str()) == 0;
      });
    };
    const auto& [a, b] = hosts_;
    if (!all({"ip netns add " + a, "ip netns add " + b,
              "ip link add tw0 netns " + a + " type veth peer name tw0 netns " + b,
              "ip -n " + a + " addr add 10.77.1.1/24 dev tw0",
              "ip -n " + b + " addr add 10.77.1.2/24 dev tw0", "ip -n " + a + " link set lo up",
              "ip -n " + a + " link set tw0 up", "ip -n " + b + " link set tw0 up"})) {
      GTEST_SKIP() << "network namespaces need root, CAP_NET_ADMIN and the command ip (iproute2)";
    }
  }
  void TearDown() override {
    for (const std::string& host : hosts_) {
      [[maybe_unused]] const int ignored =
          std::system(("ip netns del " + host + " 2>/dev/null").c_str());
    }
  }
  // One rank on each machine.
  std::array<pid_t, 2> start_ranks(const std::vector<std::string>& words,
                                   const std::string& address = "10.77.1.1",
                                   const std::string& interface = {}) const {
    const auto start = [&](int rank) {
      return start_rank(rank, {"ip", "netns", "exec", hosts_[static_cast<size_t>(rank)]},
                        torchrun(rank, {"MASTER_ADDR=" + address, "MASTER_PORT=29400",
                                        rank == 1 ? "GLOO_SOCKET_IFNAME=" + interface : "A=1"}),
                        words);
    };
    return {start(0), start(1)};
  }

  std::array<std::string, 2> hosts_ = {"twell-a-", "twell-b-"};
};

TEST_F(HostsTest, AddressesThatOtherRanksCannotUseAreRefused) {
  const auto& [a, b] = hosts_;
  ASSERT_EQ(
      std::system(("ip link add tw1 netns " + a + " type veth peer name tw1 netns " + b).c_str()),
      0);
  const std::vector<std::string> words = train("run", {"--device", "cpu"});
  const auto ranks = start_ranks(words, "10.77.1.1", "tw1");
  expect_all_end({ranks[0], ranks[1]}, 1, "GLOO_SOCKET_IFNAME: network interface tw1 has no");
}

TEST_F(HostsTest, TwoMachinesTrainAndAPulledCableEndsBothRanks) {
  const std::vector<std::string> options = {"--device", "cpu", "--collective-timeout", "6"};
  const auto with_steps = [&](const char* steps) {
    std::vector<std::string> more = options;
    more.insert(more.end(), {"--steps", steps});
    return more;
  };
  finish_ranks(start_ranks(train("two", with_steps("20"))), 0);
  std::vector<std::string> here = with_steps("20");
  here.insert(here.end(), {"--ranks", "2"});
  ASSERT_EQ(run(train("one", here)).code, 0);
  EXPECT_EQ(curve("two"), curve("one"));
  const auto weights = [this](const char* run) {
    return slurp(folder_ / run / "checkpoint" / "model.safetensors");
  };
  EXPECT_TRUE(weights("two") == weights("one"));

  const auto ranks = start_ranks(train("cut", with_steps("100000")));
  wait_for_lines("cut", 10);
  ASSERT_EQ(std::system(("ip -n " + hosts_[0] + " link set tw0 down").c_str()), 0);
  const auto begin = std::chrono::steady_clock::now();
  const auto logs = finish_ranks(ranks, 1);
  EXPECT_THAT(logs[0], HasSubstr("rank 1 has not answered for"));
  EXPECT_THAT(logs[1], HasSubstr("rank 0 has not answered for"));
  for (const std::string& log : logs) {
    EXPECT_THAT(log, HasSubstr("the last good checkpoint is cut/checkpoints/step-"));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
  const int64_t steps = lines("cut");
  EXPECT_EQ(run({"train", "--out", "cut", "--resume", "--steps", std::to_string(steps + 2)}).code,
            0);
}

TEST_F(DistributedTest, ProcessesTrainAndAnyNumberOfThemContinues) {
  ASSERT_EQ(run(train("one", {"--steps", "16"})).code, 0);
  const Result two = run(train("two", {"--steps", "4", "--steps", "16", "--ranks", "2"}));
  ASSERT_EQ(two.code, 0) << two.err;
  EXPECT_THAT(two.out, HasSubstr("2 ranks, CPU"));
  EXPECT_EQ(two.out.find("finished after 16"), two.out.rfind("finished after 16")) << two.out;
  // The launcher warns, and not its processes again.
  EXPECT_EQ(two.err, "twell: warning: --steps was given twice; the last one, 16, is used\n");
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
    // Both other ranks find it; one prints it.
    EXPECT_NE(result.err.find(fault), std::string::npos) << result.err;
    EXPECT_EQ(result.err.find(fault), result.err.rfind(fault)) << result.err;
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

// Ranks are lost before the run has gone back to the step, and again after it, where nothing was
// saved since.
TEST_F(DistributedTest, ARestartKeepsResumeFromAndTheOptionsGivenWithIt) {
  ASSERT_EQ(run(train("run", {"--steps", "24", "--keep-last", "9", "--ranks", "2"})).code, 0);
  std::vector<double> expected = curve("run");
  expected.resize(8);
  for (const bool early : {true, false}) {
    fs::remove(folder_ / "stdout");
    const std::string steps = early ? "60" : "160";
    const pid_t launcher = start({"train", "--out", "run", "--resume-from", "8", "--steps", steps,
                                  "--save-every", "1000", "--ranks", "2", "--max-restarts", "1"});
    const pid_t first = process(0), second = process(1);
    if (!early) {
      const auto saved = folder_ / "run" / "checkpoints" / "step-000060";
      for (int i = 0; i < 4000 && fs::exists(saved); ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      wait_for_lines("run", 12);
      EXPECT_EQ(fs::read_symlink(folder_ / "run" / "checkpoint"), "checkpoints/step-000008");
    }
    ASSERT_EQ(::kill(first, SIGKILL), 0);
    if (early) {
      ASSERT_EQ(::kill(second, SIGKILL), 0);
    }
    const Result result = finish(launcher);
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr("restart 1 of 1"));
    EXPECT_THAT(result.out.substr(result.out.rfind("ranks: ")), HasSubstr("resumed at step 8"));
    EXPECT_EQ(option("run", "steps"), std::stoll(steps));
    EXPECT_EQ(option("run", "save-every"), 1000);
    std::vector<double> losses = curve("run");
    EXPECT_EQ(losses.size(), static_cast<size_t>(std::stoll(steps)));
    losses.resize(8);
    EXPECT_EQ(losses, expected);
  }
}

TEST_F(DistributedTest, AFinishedRunWhoseOutputIsLostIsNotRestarted) {
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe(pipe.data()), 0);
  ::close(pipe[0]);
  const pid_t launcher =
      start(train("run", {"--steps", "6", "--ranks", "2", "--max-restarts", "2"}), pipe[1]);
  ::close(pipe[1]);
  const Result result = finish(launcher);
  EXPECT_EQ(result.code, 1);
  EXPECT_EQ(result.err.find("restart"), std::string::npos) << result.err;
  EXPECT_EQ(lines("run"), 6);
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
  // systemd and Slurm signal the ranks as well.
  for (const bool ranks_too : {false, true}) {
    const std::string out = ranks_too ? "all" : "run";
    fs::remove(folder_ / "stdout");
    const pid_t launcher = start(train(out, options));
    wait_for_lines(out, 6);
    if (ranks_too) {
      ::kill(process(0), SIGTERM);
      ::kill(process(1), SIGTERM);
    }
    ::kill(launcher, SIGTERM);
    const Result result = finish(launcher);
    EXPECT_EQ(result.code, 130) << result.err;
    EXPECT_THAT(result.out, HasSubstr("interrupted and saved"));
    EXPECT_EQ(
        run({"train", "--out", out, "--resume", "--steps", std::to_string(lines(out) + 3)}).code,
        0);
  }
}

// A rank that receives a signal tells the others: all save, and nothing is restarted.
TEST_F(DistributedTest, ASignalToOneRankSavesAndEndsTheLauncher) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const std::string out = "run" + std::to_string(signal);
    fs::remove(folder_ / "stdout");
    const pid_t launcher =
        start(train(out, {"--steps", "100000", "--ranks", "2", "--max-restarts", "3"}));
    wait_for_lines(out, 6);
    ::kill(process(1), signal);
    const Result result = finish(launcher);
    EXPECT_EQ(result.code, 130) << result.err;
    EXPECT_THAT(result.out, HasSubstr("interrupted and saved"));
    EXPECT_THAT(result.err, HasSubstr("received signal " + std::to_string(signal)));
    if (signal == SIGTERM) {
      EXPECT_THAT(result.err, testing::StartsWith("twell: rank 1 received signal 15 (Terminated)"));
    }
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
}

// The run goes on with as many ranks as it had, and refusals are printed once.
TEST_F(DistributedTest, AResumedRunHasItsRanks) {
  ASSERT_EQ(run(train("run", {"--steps", "4", "--ranks", "2"})).code, 0);
  const Result same = run({"train", "--out", "run", "--resume", "--steps", "6"});
  EXPECT_EQ(same.code, 0) << same.err;
  EXPECT_THAT(same.out, HasSubstr("ranks: 2 processes"));
  const Result one = run({"train", "--out", "run", "--resume", "--steps", "8", "--ranks", "1"});
  EXPECT_EQ(one.code, 0) << one.err;
  EXPECT_THAT(one.out, testing::Not(HasSubstr("processes")));
  const Result alone = run({"train", "--out", "run", "--resume", "--steps", "10"});
  EXPECT_THAT(alone.out, testing::Not(HasSubstr("processes")));
  EXPECT_EQ(alone.code, 0) << alone.err;
  const Result refused =
      run({"train", "--out", "run", "--resume", "--ranks", "2", "--lr", "0.5", "--steps", "12"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("another lr"));
  EXPECT_EQ(refused.err.find("another lr"), refused.err.rfind("another lr")) << refused.err;
}

// A requeued job: Slurm ends its ranks by SIGTERM and runs the same command again.
TEST_F(DistributedTest, AJobThatSlurmRequeuesResumesBitForBit) {
  const std::vector<std::string> steps = {"--steps", "60", "--device", "cpu"};
  std::vector<std::string> alone = steps;
  alone.insert(alone.end(), {"--ranks", "2"});
  ASSERT_EQ(run(train("whole", alone)).code, 0);
  const auto srun = [&](int rank, const char* restarts) {
    const std::string number = std::to_string(rank);
    return start_rank(
        rank, {},
        {"SLURM_PROCID=" + number, "SLURM_LOCALID=" + number, "SLURM_STEP_NUM_TASKS=2",
         "SLURM_STEP_TASKS_PER_NODE=2", "SLURM_NODEID=0", "SLURM_STEP_NODELIST=localhost",
         "SLURM_JOB_ID=" + std::to_string(::getpid()), "SLURM_STEP_ID=0", restarts},
        train("requeued", steps));
  };
  // Slurm sets no count at the first start.
  const std::array<pid_t, 2> first = {srun(0, "A=1"), srun(1, "A=1")};
  wait_for_lines("requeued", 6);
  for (const pid_t rank : first) ::kill(rank, SIGTERM);
  EXPECT_THAT(finish_ranks(first, 143)[0], HasSubstr("interrupted and saved"));
  EXPECT_LT(lines("requeued"), 60);
  const pid_t one = srun(1, "SLURM_RESTART_COUNT=1");
  const auto logs = finish_ranks({srun(0, "SLURM_RESTART_COUNT=1"), one}, 0);
  EXPECT_THAT(logs[0], HasSubstr("resumed at step"));
  EXPECT_EQ(curve("requeued"), curve("whole"));
  EXPECT_TRUE(slurp(folder_ / "requeued" / "checkpoint" / "model.safetensors") ==
              slurp(folder_ / "whole" / "checkpoint" / "model.safetensors"));
}

// torchrun runs the same command again when a rank was lost.
TEST_F(DistributedTest, ACommandThatTorchrunRepeatsResumes) {
  const std::vector<std::string> words = train("run", {"--steps", "8", "--device", "cpu"});
  ASSERT_EQ(run(words).code, 0);
  expect_refused(words, "already holds a training run");
  const auto starts_over = [&](const std::string& steps) {
    std::vector<std::string> longer = words;
    std::replace(longer.begin(), longer.end(), std::string("8"), steps);
    longer.insert(longer.end(), {"--resume-from", "4"});
    ::setenv("TORCHELASTIC_RESTART_COUNT", "1", 1);
    const Result again = run(longer);
    ::unsetenv("TORCHELASTIC_RESTART_COUNT");
    EXPECT_EQ(again.code, 0) << again.err;
    EXPECT_THAT(again.err, HasSubstr("--resume-from 4 was for the first start"));
    return again.out.find("resumed at step") == std::string::npos;
  };
  EXPECT_FALSE(starts_over("12"));
  EXPECT_EQ(lines("run"), 12);
  // Nothing of the run was saved.
  fs::remove_all(folder_ / "run" / "checkpoints");
  fs::remove(folder_ / "run" / "checkpoint");
  EXPECT_TRUE(starts_over("6"));
  EXPECT_EQ(lines("run"), 6);
}

TEST_F(DistributedTest, AnotherLaunchersProcessesFindEachOther) {
  const std::vector<std::string> words = train("run", {"--steps", "6", "--device", "cpu"});
  run_by_hand(words, words, 0);
  EXPECT_EQ(lines("run"), 6);
  EXPECT_TRUE(fs::exists(folder_ / "run" / "checkpoint" / "trainer" /
                         "optimizer-00001-of-00002.safetensors"));
}

}  // namespace
