// SPDX-License-Identifier: Apache-2.0
// What `twell train`, `tokenize`, `convert` and `report` do to files: runs that repeat, are killed
// and resume, shards that go on after a kill, and bad data.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/test_command.h"

namespace {

namespace fs = std::filesystem;
using testing::ContainsRegex;
using testing::HasSubstr;
using twell::slurp;

class CliTest : public twell::RunTest {
 protected:
  // The first token file in a folder of shards.
  fs::path shard_file(const std::string& shards) const {
    for (const fs::directory_entry& entry : fs::directory_iterator(folder_ / shards)) {
      if (entry.path().extension() != ".json") return entry.path();
    }
    ADD_FAILURE() << "no shard in " << shards;
    return {};
  }
  // Sends `signal` after the run has logged `count` steps.
  Result signal_after(pid_t child, const std::string& run, int64_t count, int signal) const {
    wait_for_lines(run, count);
    ::kill(child, signal);
    return finish(child);
  }
};

TEST_F(CliTest, TrainsAndARepeatIsTheSame) {
  const Result first = run(train("a", {"--steps", "4", "--tensorboard"}));
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_EQ(first.err, "");
  EXPECT_THAT(first.out, HasSubstr("finished after 4 of 4 steps"));
  for (const char* file : {"checkpoint/config.json", "checkpoint/model.safetensors",
                           "checkpoint/tokenizer.json", "metrics.jsonl", "options.json"}) {
    EXPECT_TRUE(fs::exists(folder_ / "a" / file)) << file;
  }
  ASSERT_EQ(run(train("b", {"--steps", "4"})).code, 0);
  EXPECT_EQ(weights("a"), weights("b"));
}

// Texts of the model stand in the metrics, on the console and in the report. They change no step,
// and a resumed run goes on with them.
TEST_F(CliTest, SamplesInTraining) {
  const std::vector<std::string> every = {"--sample-every",  "3",     "--sample-prompt", "note <b>",
                                          "--sample-prompt", "value", "--sample-tokens", "6"};
  ASSERT_EQ(run(train("plain", {"--steps", "7"})).code, 0);
  std::vector<std::string> more = {"--steps", "5", "--warmup-steps", "1", "--tensorboard"};
  more.insert(more.end(), every.begin(), every.end());
  const Result first = run(train("a", more));
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_THAT(first.out, ContainsRegex("\ntext: note <b>.*\ntext: value"));
  const Result resumed = run({"train", "--out", "a", "--resume", "--steps", "7"});
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  const auto rows = [&](const std::string& out) {
    std::vector<nlohmann::json> found;
    std::istringstream lines(slurp(folder_ / out / "metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      found.push_back(nlohmann::json::parse(line));
    }
    return found;
  };
  std::vector<int64_t> sampled;
  for (const nlohmann::json& row : rows("a")) {
    if (!row.contains("samples")) continue;
    sampled.push_back(row["step"]);
    ASSERT_EQ(row["samples"].size(), 2u);
    EXPECT_EQ(row["samples"][0]["prompt"], "note <b>");
    EXPECT_FALSE(row["samples"][1]["text"].get<std::string>().empty());
  }
  EXPECT_EQ(sampled, (std::vector<int64_t>{3, 5, 6, 7}));
  ASSERT_EQ(run(train("b", {"--steps", "7", "--warmup-steps", "1"})).code, 0);
  std::vector<std::string> seven = more;
  seven[1] = "7";
  ASSERT_EQ(run(train("c", seven)).code, 0);
  EXPECT_EQ(weights("b"), weights("c"));
  EXPECT_EQ(rows("a").back()["samples"].size(), rows("c").back()["samples"].size());
  ASSERT_EQ(run({"report", "--out", "a", "--html", "a.html"}).code, 0);
  const std::string page = slurp(folder_ / "a.html");
  EXPECT_THAT(page, HasSubstr("<h2>Texts</h2>"));
  EXPECT_THAT(page, HasSubstr("<b>224</b><span>tokens</span>"));  // a small run's are not "0.0 M"
  EXPECT_THAT(page, testing::ContainsRegex("<b>[0-9.]+ k</b><span>parameters</span>"));
  EXPECT_THAT(page, HasSubstr("<b>note &lt;b&gt;</b>"));
  EXPECT_THAT(page, testing::Not(HasSubstr("note <b>")));

  expect_refused(train("d", {"--sample-prompt", "x"}), "--sample-prompt goes with --sample-every");
  expect_refused(train("d", {"--sample-every", "1", "--sample-tokens", "0"}), "must be 1 to");
  const Result long_prompt =
      run(train("d", {"--sample-every", "1", "--sample-prompt", std::string(200, 'x')}));
  EXPECT_EQ(long_prompt.code, 2);
  EXPECT_THAT(long_prompt.err, HasSubstr("the context of 16 leaves no room"));
  EXPECT_EQ(run(train("d", {"--steps", "1"})).code, 0);  // the same folder, without the fault
  fs::remove(folder_ / "d/shards/tokenizer.json");
  expect_refused(
      {"train", "--shards", "d/shards", "--out", "e", "--width", "16", "--sample-every", "1"},
      "is no folder of shards, with manifest.json and tokenizer.json");
}

TEST_F(CliTest, ReportsARunWithABenchmarkOfEitherDevice) {
  ASSERT_EQ(run(train("r", {"--steps", "4", "--validate-every", "2"})).code, 0);
  const Result plain = run({"report", "--out", "r"});
  EXPECT_EQ(plain.code, 0) << plain.err;
  EXPECT_THAT(plain.out, testing::Not(HasSubstr("forward")));
  // The page has every curve, and nothing from elsewhere.
  ASSERT_EQ(run({"report", "--out", "r", "--html", "r.html"}).code, 0);
  const std::string page = slurp(folder_ / "r.html");
  for (const char* title : {"Loss", "Validation", "Active neurons", "Dead neurons", "Speed"}) {
    EXPECT_THAT(page, HasSubstr(fmt::format("<h2>{}</h2>", title)));
  }
  EXPECT_THAT(page, testing::Not(HasSubstr("http")));
  EXPECT_THAT(page, testing::Not(HasSubstr("nan")));
  const std::string cpu =
      R"({"cpu":"c","threads":2,"max_abs_logit_diff":1e-5,)"
      R"("dense":{"full":{"tokens_per_s":100},"layers":{"tokens_per_s":120}},)"
      R"("sparse":{"full":{"tokens_per_s":150},"layers":{"tokens_per_s":240}}})";
  const std::string gpu = R"({"cpu":"c","gpu":"g","sparse_relative_difference":0.005,)"
                          R"("dense":{"full":{"tokens_per_s":1000},"body":{"tokens_per_s":1200}},)"
                          R"("sparse":{"full":{"tokens_per_s":1700},"body":{"tokens_per_s":1}}})";
  for (const auto& [row, ratio] : {std::pair(cpu, "1.50x"), std::pair(gpu, "1.70x")}) {
    write("r/bench.jsonl", row + "\n");
    const Result report = run({"report", "--out", "r"});
    EXPECT_EQ(report.code, 0) << report.err;
    EXPECT_THAT(report.out, HasSubstr(ratio));
    EXPECT_TRUE(fs::exists(folder_ / "r" / "report.json"));
  }
  // The table ends with the last step even if that was not validated.
  std::string metrics = slurp(folder_ / "r/metrics.jsonl");
  metrics.replace(metrics.rfind("\"val_ce\""), 8, "\"no_val\"");
  write("r/metrics.jsonl", metrics);
  EXPECT_THAT(run({"report", "--out", "r"}).out, ContainsRegex("[0-9]  +-  +[0-9.]+ +[0-9.]+%"));
  write("r/bench.jsonl", "{}\n");
  expect_refused({"report", "--out", "r"}, "bench.jsonl is not as this version writes it");
}

TEST_F(CliTest, InterruptedAndKilledRunsResumeToTheSameWeights) {
  const std::vector<std::string> options = {"--steps",          "300", "--save-every", "20",
                                            "--validate-every", "0"};
  ASSERT_EQ(run(train("whole", options)).code, 0);

  Result stopped = signal_after(start(train("int", options)), "int", 30, SIGTERM);
  EXPECT_EQ(stopped.code, 143) << stopped.err;
  EXPECT_THAT(stopped.out, HasSubstr("interrupted and saved"));
  stopped = signal_after(start({"train", "--out", "int", "--resume"}), "int", 60, SIGHUP);
  EXPECT_EQ(stopped.code, 129) << stopped.err;
  EXPECT_THAT(stopped.out, HasSubstr("interrupted and saved"));
  const Result resumed = run({"train", "--out", "int", "--resume"});
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(weights("int"), weights("whole"));

  EXPECT_EQ(signal_after(start(train("kill", options)), "kill", 50, SIGKILL).code, 128 + SIGKILL);
  EXPECT_EQ(run(train("kill", {"--steps", "300", "--validate-every", "0", "--save-every", "20",
                               "--resume"}))
                .code,
            0);
  EXPECT_EQ(weights("kill"), weights("whole"));
}

TEST_F(CliTest, OutputFolders) {
  ASSERT_EQ(run(train("a", {"--steps", "2"})).code, 0);
  const std::string before = weights("a");
  expect_refused(train("a", {"--steps", "2"}), "--resume");
  expect_refused(train("b", {"--steps", "2", "--resume"}), "nothing to resume");
  expect_refused({"train", "--out", "a", "--resume", "--lr", "0.5"}, "another lr");
  expect_refused({"train", "--out", "a", "--resume", "--width", "32"}, "--width 32, there ");
  expect_refused({"train", "--out", "a", "--resume", "--steps", "1"}, "has done 2 steps already");
  const Result done = run({"train", "--out", "a", "--resume"});
  EXPECT_EQ(done.code, 0) << done.err;
  EXPECT_THAT(done.out, HasSubstr("a larger --steps trains on"));
  expect_refused(train("text/1.txt", {"--steps", "2"}), "text/1.txt");
  expect_refused(train("", {"--steps", "2"}), "--out");
  EXPECT_EQ(weights("a"), before);
  // A longer run keeps the warm-up derived from the shorter one.
  ASSERT_EQ(run(train("longer", {"--steps", "20"})).code, 0);
  const Result longer = run({"train", "--out", "longer", "--resume", "--steps", "40"});
  EXPECT_EQ(longer.code, 0) << longer.err;
  EXPECT_THAT(longer.out, HasSubstr("finished after 40 of 40 steps"));
  // Only the whole run has a first validation.
  EXPECT_THAT(longer.out, testing::Not(ContainsRegex("validation CE +[0-9.]+ -> ")));
  fs::remove_all(folder_ / "longer/checkpoints");
  const std::string metrics = slurp(folder_ / "longer/metrics.jsonl");
  expect_refused({"train", "--out", "longer", "--resume"}, "the checkpoints of longer are lost");
  EXPECT_EQ(slurp(folder_ / "longer/metrics.jsonl"), metrics);

  const Result from = run({"train", "--data", "text", "--out", "c", "--from", "a/checkpoint",
                           "--steps", "2", "--micro-batch", "2", "--threads", "1"});
  EXPECT_EQ(from.code, 0) << from.err;
  expect_refused(
      {"train", "--data", "text", "--out", "d", "--from", "a/checkpoint", "--width", "16"},
      "--from");
  fs::resize_file(folder_ / "a/checkpoint/model.safetensors", 2000);
  expect_refused({"train", "--data", "text", "--out", "d", "--from", "a/checkpoint"},
                 "model.safetensors");
}

// The current folder holds a run, which an option that was not given must not mean.
TEST_F(CliTest, NoPathIsNoFolder) {
  const std::string empty = run({"train", "--dry-run"}).out;
  ASSERT_EQ(run(train("other", {"--steps", "2"})).code, 0);
  fs::copy(folder_ / "other" / "checkpoint/", folder_ / "checkpoint", fs::copy_options::recursive);
  fs::copy(folder_ / "other" / "shards", folder_ / "shards", fs::copy_options::recursive);
  const Result plan = run({"train", "--dry-run"});
  EXPECT_EQ(plan.code, 0) << plan.err;
  EXPECT_EQ(plan.out, empty);
  ASSERT_EQ(run(train("new", {"--steps", "2", "--width", "24"})).code, 0);
  EXPECT_THAT(slurp(folder_ / "new/checkpoint/config.json"), HasSubstr("\"hidden_size\": 24"));
  const Result bench = run({"bench", "decode", "--preset", "tiny", "--device", "cpu", "--batch",
                            "1", "--prompt-tokens", "8", "--tokens", "2"});
  EXPECT_EQ(bench.code, 0) << bench.err;
  write("options.json", R"({"width": "24"})");
  expect_refused({"train", "--dry-run", "--resume"}, "add --out DIR");
}

// A run that is killed before its first checkpoint begins again, whether it is resumed or started.
TEST_F(CliTest, KilledBeforeTheFirstCheckpoint) {
  const std::vector<std::string> options = {"--steps",          "60", "--save-every", "0",
                                            "--validate-every", "0"};
  ASSERT_EQ(run(train("whole", options)).code, 0);
  for (const bool resume : {true, false}) {
    const std::string out = resume ? "resumed" : "started";
    std::vector<std::string> longer = options;
    longer[1] = "100000";
    EXPECT_EQ(signal_after(start(train(out, longer)), out, 5, SIGKILL).code, 128 + SIGKILL);
    const Result again =
        resume ? run({"train", "--out", out, "--resume", "--steps", "60", "--warmup-steps", "6"})
               : run(train(out, options));
    EXPECT_EQ(again.code, 0) << again.err;
    EXPECT_THAT(again.out, HasSubstr("ended before its first checkpoint: it begins again"));
    EXPECT_EQ(weights(out), weights("whole"));
    const std::string metrics = slurp(folder_ / out / "metrics.jsonl");
    EXPECT_EQ(std::count(metrics.begin(), metrics.end(), '\n'), 60);
  }
}

TEST_F(CliTest, AResumedRunRefusesOtherData) {
  ASSERT_EQ(run(train("a", {"--steps", "2", "--max-data-bytes", "50000"})).code, 0);
  fs::create_directory(folder_ / "more");
  write("more/1.txt", "other text");
  const auto refused = [&](const std::vector<std::string>& more, const std::string& fault) {
    std::vector<std::string> words = {"train", "--out", "a", "--resume"};
    words.insert(words.end(), more.begin(), more.end());
    expect_refused(words, fault);
  };
  const std::string text = (folder_ / "text").string();
  refused({"--data", "more"}, "another --data: the run has " + text + ", now more was given");
  refused({"--data", "text", "more"}, "another --data");
  refused({"--tokenizer", "a/checkpoint/tokenizer.json"},
          "another --tokenizer: the run has none, now a/checkpoint/tokenizer.json was given");
  refused({"--max-data-bytes", "60k"}, "the run has 50000, now 60k was given");
  refused({"--val-fraction", "0.5"}, "the run has 0.01, now 0.5 was given");
  refused({"--from", "a"}, "another --from");
  refused({"--bad-files", "skip"}, "the run has error, now skip was given");
  const Result same = run({"train", "--out", "a", "--resume", "--steps", "4", "--data", "./text/",
                           "--max-data-bytes", "50k", "--val-fraction", "1e-2"});
  EXPECT_EQ(same.code, 0) << same.err;
}

// A damaged line hides nothing that stands behind it, neither in a resumed run nor in a report.
TEST_F(CliTest, ADamagedLineOfMetrics) {
  ASSERT_EQ(run(train("a", {"--steps", "6", "--validate-every", "2"})).code, 0);
  std::string metrics = slurp(folder_ / "a/metrics.jsonl");
  const int64_t lines = std::count(metrics.begin(), metrics.end(), '\n');
  const size_t third = metrics.find("\"step\":3");
  metrics[metrics.rfind('{', third)] = '\0';
  write("a/metrics.jsonl", metrics);
  const Result report = run({"report", "--out", "a"});
  EXPECT_EQ(report.code, 0) << report.err;
  EXPECT_THAT(report.err, HasSubstr("warning: a/metrics.jsonl: line 4 is damaged"));
  EXPECT_THAT(report.out, HasSubstr("\n       6 "));
  const Result resumed = run({"train", "--out", "a", "--resume", "--steps", "8"});
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(resumed.err, HasSubstr("line 4 is damaged"));
  metrics = slurp(folder_ / "a/metrics.jsonl");
  EXPECT_EQ(std::count(metrics.begin(), metrics.end(), '\n'), lines + 2);
  const Result json = run({"report", "--out", "a", "--json"});
  EXPECT_EQ(nlohmann::json::parse(json.out)["steps"], 8) << json.out;
  EXPECT_EQ(json.out, slurp(folder_ / "a/report.json"));
}

// A service may start with its standard descriptors closed: no file gets their numbers.
TEST_F(CliTest, ClosedStandardDescriptors) {
  std::string command = "cd " + folder_.string() + " && " + TWELL_BINARY;
  for (const std::string& word : train("a", {"--steps", "5", "--log-every", "0"})) {
    command += " '" + word + "'";
  }
  EXPECT_EQ(std::system((command + " <&- >&- 2>&-").c_str()), 0);
  std::istringstream rows(slurp(folder_ / "a/metrics.jsonl"));
  int64_t count = 0;
  for (std::string line; std::getline(rows, line); ++count) {
    EXPECT_TRUE(nlohmann::json::accept(line)) << line;
  }
  EXPECT_EQ(count, 6);
  EXPECT_EQ(run({"eval", "--checkpoint", "a", "--data", "text"}).code, 0);
}

// Paths are bytes; JSON holds text.
TEST_F(CliTest, PathsThatAreNotUtf8) {
  const std::string out = "caf\xe9", data = "d\xe4t\xef\x9e\x80";
  fs::rename(folder_ / "text", folder_ / data);
  std::vector<std::string> words = train(out, {"--steps", "4", "--save-every", "2"});
  words[2] = data;
  const Result trained = run(words);
  ASSERT_EQ(trained.code, 0) << trained.err;
  EXPECT_TRUE(nlohmann::json::accept(slurp(folder_ / out / "options.json")));
  // The options are read as they were.
  const Result resumed = run({"train", "--out", out, "--resume", "--steps", "6", "--data", data});
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  for (const std::vector<std::string>& command : std::vector<std::vector<std::string>>{
           {"report", "--out", out, "--json"},
           {"eval", "--checkpoint", out, "--data", data, "--json"},
           {"inspect", "--checkpoint", out, "--json"}}) {
    const Result result = run(command);
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_TRUE(nlohmann::json::accept(result.out)) << result.out;
  }
  expect_refused({"train", "--out", out, "--resume", "--data", "b\xe4"}, "another --data");
}

TEST_F(CliTest, WarmupStableDecayResumesBitForBit) {
  const std::vector<std::string> options = {"--steps",    "300", "--save-every",     "20",
                                            "--schedule", "wsd", "--decay-fraction", "0.9"};
  ASSERT_EQ(run(train("whole", options)).code, 0);
  EXPECT_EQ(signal_after(start(train("cut", options)), "cut", 50, SIGKILL).code, 128 + SIGKILL);
  const Result resumed = run({"train", "--out", "cut", "--resume"});
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(weights("cut"), weights("whole"));
  expect_refused({"train", "--out", "cut", "--resume", "--schedule", "cosine"},
                 "--decay-fraction 0.9 goes with --schedule wsd");
}

// Moments in bf16 are rounded by numbers that depend on seed, step and place alone.
TEST_F(CliTest, MomentsInBf16ResumeBitForBit) {
  const std::vector<std::string> options = {"--steps",        "300",  "--save-every", "20",
                                            "--moment-dtype", "bf16", "--beta2",      "0.999"};
  ASSERT_EQ(run(train("whole", options)).code, 0);
  EXPECT_EQ(signal_after(start(train("cut", options)), "cut", 50, SIGKILL).code, 128 + SIGKILL);
  ASSERT_EQ(run({"train", "--out", "cut", "--resume"}).code, 0);
  EXPECT_EQ(weights("cut"), weights("whole"));
  std::vector<std::string> exact = options;
  exact[5] = "f32";
  ASSERT_EQ(run(train("f32", exact)).code, 0);
  EXPECT_NE(weights("f32"), weights("whole"));
}

TEST_F(CliTest, BadData) {
  write("empty.txt", "");
  write("binary.txt", std::string("\x7f"
                                  "ELF\x00\x01\x02\x00\xff\xfe",
                                  10));
  write("latin.txt", "caf\xe9 au lait\n");
  write("broken.jsonl", "{\"text\": \"fine\"}\n{\"text\": \n");
  write("no.txt.gz", "not gzip");
  for (const char* data :
       {"missing", "empty.txt", "binary.txt", "latin.txt", "broken.jsonl", "no.txt.gz"}) {
    std::vector<std::string> words = train("x");
    words[2] = data;
    expect_refused(words, data);
  }
  expect_refused({"train", "--out", "x"}, "--data");
  expect_refused(train("x", {"--tokenizer", "missing.json"}), "missing.json");
  write("tokenizer.json", R"({"model": {"type": "Unigram", "vocab": []}})");
  expect_refused(train("x", {"--tokenizer", "tokenizer.json"}), "tokenizer.json");
  EXPECT_FALSE(fs::exists(folder_ / "x" / "options.json"));
}

TEST_F(CliTest, ConfigFiles) {
  write("a.json", R"({"model": {"width": 64, "layers": 3, "heads": 4, "ffn": 128, "gated": false},
                     "steps": 7, "l1_reduction": "mean"})");
  write("a.toml",
        "steps = 7\nl1-reduction = \"mean\"\n[model]\nwidth = 64\nlayers = 3\n"
        "heads = 4\nffn = 128\ngated = false\n");
  const Result json = run({"train", "--dry-run", "--config", "a.json"});
  const Result toml = run({"train", "--dry-run", "--config", "a.toml"});
  const Result flags = run({"train", "--dry-run", "--width", "64", "--layers", "3", "--heads", "4",
                            "--ffn", "128", "--no-gated", "--steps", "7"});
  EXPECT_EQ(json.code, 0) << json.err;
  EXPECT_EQ(json.out, flags.out);
  EXPECT_EQ(toml.out, flags.out);
  EXPECT_NE(run({"train", "--dry-run", "--no-gated"}).out, run({"train", "--dry-run"}).out);
  EXPECT_EQ(run({"train", "--dry-run", "--gated"}).out, run({"train", "--dry-run"}).out);
  EXPECT_NE(run({"train", "--dry-run", "--untied"}).out, run({"train", "--dry-run"}).out);
  const Result wins = run({"train", "--dry-run", "--steps", "8", "--config", "a.json"});
  EXPECT_THAT(wins.out, testing::ContainsRegex("steps +8\n"));

  const auto refused = [&](const std::string& name, const std::string& text,
                           const std::string& fault) {
    write(name, text);
    expect_refused({"train", "--dry-run", "--config", name}, fault);
  };
  // In quotes, '#' starts no comment and brackets start no list.
  write("#1 [a].txt", "text");
  write("quoted.toml",
        "[run]\ndata = [\"text\", \"#1 [a].txt\"] # both\nout = \"run_x \u03bb #1\"\nsteps = 1\n");
  EXPECT_EQ(run({"train", "--config", "quoted.toml", "--width", "16", "--ffn", "48", "--layers",
                 "1", "--heads", "2", "--context", "16", "--vocab-size", "300", "--threads", "1"})
                .code,
            0);
  EXPECT_TRUE(fs::exists(folder_ / "run_x \u03bb #1" / "checkpoint"));

  refused("b.json", R"({"widht": 64})", "unknown key 'widht'");
  refused("b.toml", "widht = 64\n", "unknown key 'widht'");
  refused("b.json", R"({"width": 64, "width": 32})", "width");
  refused("b.toml", "width = 64\nsteps = 3\nwidth = 32\n", "width");
  refused("b.toml", "width = 64\nsteps 3\n", "b.toml:2: ");
  refused("b.toml", "steps = 3\n\u03bb = 2\n", "unknown key '\u03bb'");
  refused("b.toml", "max_x\u03bb_x3 = 2\n", "unknown key 'max_x\u03bb_x3'");
  refused("b.toml", "out = \"\"\"\n\u03bb\"\"\"\"\"#\u03bb\n\u03bb", "b.toml:3: ");
  refused("b.toml", "steps = 5cz\"a\ufcff\n", "b.toml:1: ");
  refused("b.toml", "steps = 5\n#\xCE\n", "b.toml:2: not UTF-8");
  refused("b.toml", "steps = 1979-05-27\n", "steps must be a string, number or boolean");
  refused("b.toml", "lr = inf\n", "got inf");
  refused("b.json", R"({"steps": "many"})", "steps");
  refused("b.json", R"({"steps": )", "b.json");
  refused("b.json", R"({"dry-run": true})", "dry-run");
  expect_refused({"train", "--dry-run", "--config", "missing.toml"}, "missing.toml");
}

TEST_F(CliTest, Recipes) {
  const std::string folder = TWELL_SOURCE_DIR "/recipes/";
  const Result small = run({"train", "--dry-run", "--config", folder + "quickstart.toml"});
  EXPECT_EQ(small.code, 0) << small.err;
  EXPECT_THAT(small.out, ContainsRegex("steps +600\n"));
  // A flag wins over an option of the file that it excludes.
  const Result tokens = run({"train", "--dry-run", "--config", folder + "quickstart.toml",
                             "--tokens", "8192", "--context", "256", "--micro-batch", "8"});
  EXPECT_EQ(tokens.code, 0) << tokens.err;
  EXPECT_THAT(tokens.out, ContainsRegex("steps +4\n"));
  const Result half =
      run({"train", "--dry-run", "--config", folder + "0.5b.toml", "--device", "cpu"});
  EXPECT_EQ(half.code, 0) << half.err;
  EXPECT_THAT(half.out, ContainsRegex("steps +916\n"));
  expect_refused({"train", "--dry-run", "--config", folder + "relufy.toml"}, "--relufy");
}

TEST_F(CliTest, TokenizeThenTrainOnItsShards) {
  const std::vector<std::string> words = {"tokenize", "--data",       "text", "--out",
                                          "shards",   "--vocab-size", "300"};
  const Result first = run(words);
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_THAT(first.out, HasSubstr("bytes per token"));
  EXPECT_THAT(run(words).out, HasSubstr("already holds"));
  expect_refused({"tokenize", "--data", "text/1.txt", "--out", "shards"}, "shards is in use");
  expect_refused({"tokenize", "--data", "text", "--out", "text"}, "text is in use");
  EXPECT_THAT(run({"tokenize", "--verify", "shards"}).out, HasSubstr("every checksum right"));
  expect_refused({"tokenize", "--verify", "text"}, "text");
  expect_refused({"tokenize", "--verify", "shards", "--out", "x"}, "--verify");
  const Result trained =
      run({"train", "--shards", "shards", "--out", "a", "--width", "16", "--ffn", "48", "--heads",
           "2", "--layers", "1", "--context", "16", "--steps", "2", "--threads", "1"});
  EXPECT_EQ(trained.code, 0) << trained.err;

  // Replace a token by another valid one: only the checksum can detect this.
  const fs::path shard = shard_file("shards");
  std::string bytes = slurp(shard);
  bytes[0] = static_cast<char>(bytes[0] ^ 1);
  std::ofstream(shard, std::ios::binary) << bytes;
  expect_refused({"tokenize", "--verify", "shards"}, shard.filename().string() + " was altered");
}

// What ends a document: the token that is named, or that a file beside the tokenizer names.
TEST_F(CliTest, DocumentsEndAtTheTokenThatIsNamed) {
  const auto tokenize = [](const std::string& out, const std::vector<std::string>& more) {
    std::vector<std::string> words = {"tokenize", "--data", "text", "--out", out, "--threads", "1"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const auto last_id = [&](const std::string& shards) {
    const std::string manifest = slurp(folder_ / shards / "manifest.json");
    const auto list = nlohmann::json::parse(manifest).at("validation").at("shards");
    const std::string ids = slurp(folder_ / shards / list.back().at("file").get<std::string>());
    return static_cast<uint8_t>(ids.at(ids.size() - 2)) + 256 * ids.back();
  };
  EXPECT_EQ(run(tokenize("one", {"--vocab-size", "300", "--end-token", "<stop>"})).code, 0);
  EXPECT_EQ(last_id("one"), 0);
  EXPECT_THAT(slurp(folder_ / "one/tokenizer_config.json"), HasSubstr(R"("eos_token": "<stop>")"));
  EXPECT_EQ(run({"train", "--shards",
                 "one",   "--out",
                 "run",   "--width",
                 "16",    "--ffn",
                 "48",    "--layers",
                 "1",     "--heads",
                 "2",     "--context",
                 "16",    "--steps",
                 "1",     "--batch-tokens",
                 "32",    "--micro-batch",
                 "2",     "--validation-sequences",
                 "4",     "--threads",
                 "1"})
                .code,
            0);
  const auto config = nlohmann::json::parse(slurp(folder_ / "run/checkpoint/config.json"));
  EXPECT_EQ(config.at("eos_token_id"), 0);
  // Two tokens that could end a document; the files beside the tokenizer name either.
  auto tokenizer = nlohmann::json::parse(slurp(folder_ / "one/tokenizer.json"));
  auto second = tokenizer.at("added_tokens").at(0);
  second["id"] = 300;
  second["content"] = "<pause>";
  tokenizer["added_tokens"].push_back(second);
  fs::create_directory(folder_ / "given");
  write("given/tokenizer.json", tokenizer.dump());
  const std::vector<std::string> given = {"--tokenizer", "given/tokenizer.json"};
  expect_refused(tokenize("none", given), "no end-of-text token");
  write("given/generation_config.json", R"({"eos_token_id": [300, 0]})");
  EXPECT_EQ(run(tokenize("two", given)).code, 0);
  EXPECT_EQ(last_id("two"), 300);
  // The same command finds its shards, another end is another set.
  EXPECT_THAT(run(tokenize("two", given)).out, HasSubstr("already holds"));
  const std::vector<std::string> named = {"--tokenizer", "given/tokenizer.json", "--end-token",
                                          "<stop>"};
  expect_refused(tokenize("two", named), "two is in use");
  EXPECT_EQ(run(tokenize("three", named)).code, 0);
  EXPECT_EQ(last_id("three"), 0);
  expect_refused(tokenize("four", {"--tokenizer", "given/tokenizer.json", "--end-token", "note"}),
                 "no added token \"note\"");
}

// A folder is tokenized in parts, and a killed or stopped command goes on with the finished ones.
TEST_F(CliTest, TokenizeGoesOnAfterAKill) {
  fs::create_directory(folder_ / "web");
  for (int i = 0; i < 12; ++i) {
    std::ofstream lines(folder_ / "web" / (std::to_string(10 + i) + ".jsonl"));
    for (int j = 0; j < 9000; ++j) {
      lines << "{\"text\": \"page " << i * j << " tells what " << j % 977
            << " is: " << i * 7919 + j * 31 << " or more\", \"id\": " << j << "}\n";
    }
  }
  const auto command = [](const std::string& out, const std::vector<std::string>& more) {
    std::vector<std::string> words = {
        "tokenize", "--data",      "web",
        "--out",    out,           "--part-mib",
        "1",        "--tokenizer", golden("tasks/model/tokenizer.json")};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const auto contents = [&](const std::string& out) {
    std::map<std::string, std::string> files;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder_ / out)) {
      files[entry.path().filename().string()] = slurp(entry.path());
    }
    return files;
  };
  const auto signal_after_a_part = [&](const std::string& out, int signal) {
    const pid_t child = start(command(out, {"--threads", "1"}));
    const fs::path record = folder_ / (out + ".partial") / "parts" / "00000.json";
    for (int i = 0; i < 20000 && !fs::exists(record); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ::kill(child, signal);
    return finish(child);
  };
  ASSERT_EQ(run(command("whole", {"--threads", "1"})).code, 0);
  EXPECT_GT(contents("whole").size(), 10u);
  run({"tokenize", "--verify", "whole"});

  EXPECT_EQ(signal_after_a_part("killed", SIGKILL).code, 128 + SIGKILL);
  EXPECT_FALSE(fs::exists(folder_ / "killed"));
  const Result resumed = run(command("killed", {"--threads", "4"}));
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(resumed.out, ContainsRegex("going on with [0-9]+ of [0-9]+ parts in killed.partial"));
  EXPECT_EQ(contents("killed"), contents("whole"));
  EXPECT_FALSE(fs::exists(folder_ / "killed.partial"));
  EXPECT_THAT(run(command("killed", {})).out, HasSubstr("already holds"));

  const Result stopped = signal_after_a_part("stopped", SIGTERM);
  EXPECT_EQ(stopped.code, 143);
  EXPECT_THAT(stopped.out, ContainsRegex("[0-9]+ of [0-9]+ parts are kept in stopped.partial: the "
                                         "same command goes on with them"));
  expect_refused(command("stopped", {"--seed", "1"}), "seed was 0, now 1");
  expect_refused(command("stopped", {"--val-fraction", "0.5"}),
                 "validation_fraction was 0.01, now 0.5");
  expect_refused({"train", "--shards", "stopped.partial", "--out", "run"}, "manifest.json");
  std::ofstream(folder_ / "web" / "10.jsonl", std::ios::app) << "{\"text\": \"more\"}\n";
  expect_refused(command("stopped", {}), "10.jsonl, which has changed since");
  EXPECT_EQ(run(command("stopped", {"--changed-files", "redo", "--threads", "2"})).code, 0);
  EXPECT_EQ(run({"tokenize", "--verify", "stopped"}).code, 0);
}

TEST_F(CliTest, TokenizeStoppedBeforeItsFirstPartSaysWhatIsKept) {
  {
    std::ofstream big(folder_ / "big.txt");
    for (int i = 0; i < 1'000'000; ++i) big << "line " << i * 7 << " of one long part\n";
  }
  const std::vector<std::string> command = {
      "tokenize", "--data",       "big.txt", "--out",     "big", "--tokenizer-sample",
      "1",        "--vocab-size", "400",     "--threads", "1"};
  const pid_t child = start(command);
  const fs::path tokenizer = folder_ / "big.partial" / "tokenizer.json";
  for (int i = 0; i < 20000 && !fs::exists(tokenizer); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ::kill(child, SIGTERM);
  const Result stopped = finish(child);
  EXPECT_EQ(stopped.code, 143) << stopped.err;
  EXPECT_THAT(stopped.out, HasSubstr("no part was finished; the tokenizer is kept in big.partial: "
                                     "the same command goes on with it"));
}

// A machine without a GPU plans a run on one as far as arithmetic goes.
TEST_F(CliTest, ADryRunForAGpuNeedsNone) {
  const Result plan = run({"train", "--preset", "0.5b", "--device", "cuda", "--dry-run"});
  ASSERT_EQ(plan.code, 0) << plan.err;
  EXPECT_THAT(plan.out, HasSubstr("weights, gradients, AdamW moments"));
  EXPECT_THAT(plan.out, HasSubstr("FLOPs per step"));
  // On a machine that has one, the GPU's activations are planned too.
  EXPECT_TRUE(plan.out.find("Without a GPU here (") != std::string::npos ||
              plan.out.find("activations: FFN") != std::string::npos)
      << plan.out;
}

TEST_F(CliTest, DocumentMask) {
  // Enough tokens for the ends of some documents.
  const std::vector<std::string> options = {"--steps", "6", "--batch-tokens", "1024"};
  std::vector<std::string> masked = options;
  masked.push_back("--document-mask");
  ASSERT_EQ(run(train("mask", masked)).code, 0);
  EXPECT_THAT(slurp(folder_ / "mask" / "checkpoint" / "trainer" / "state.json"),
              HasSubstr("\"document-mask\": true"));
  ASSERT_EQ(run(train("plain", options)).code, 0);
  EXPECT_FALSE(weights("mask") == weights("plain"));
  // It is remembered.
  EXPECT_EQ(run({"train", "--out", "mask", "--resume", "--steps", "8"}).code, 0);
  expect_refused({"train", "--out", "plain", "--resume", "--steps", "8", "--document-mask"},
                 "another document-mask: the run has null, now true");
  // Evaluation does as the run did, or as it is told.
  const auto eval = [&](const std::string& of, std::vector<std::string> more) {
    more.insert(more.begin(),
                {"eval", "--checkpoint", of + "/checkpoint", "--shards", of + "/shards", "--json"});
    const std::string out = run(more).out;
    return out.substr(out.find("cross_entropy"), 30);
  };
  EXPECT_EQ(eval("mask", {}), eval("mask", {"--document-mask"}));
  EXPECT_NE(eval("mask", {}), eval("mask", {"--no-document-mask"}));
  EXPECT_EQ(eval("plain", {}), eval("plain", {"--no-document-mask"}));
  expect_refused({"bench", "train", "--preset", "tiny", "--document-mask", "--device", "cpu"},
                 "bench train needs a GPU");
}

// A model with SiLU gates is sparsified, converted to the other layout and back, and chats.
TEST_F(CliTest, SparsifyConvertAndChat) {
  auto with_silu =
      train("silu", {"--activation", "silu", "--steps", "2", "--sequence-length", "16"});
  *std::next(std::find(with_silu.begin(), with_silu.end(), "--context")) = "16384";
  const Result dense = run(with_silu);
  ASSERT_EQ(dense.code, 0);
  EXPECT_EQ(dense.err,
            "twell: warning: silu leaves no zeros: the model stays dense, and L1 is off; for a "
            "sparse one take --activation relu\n");
  EXPECT_THAT(slurp(folder_ / "silu" / "metrics.jsonl"), HasSubstr("\"l1_coeff\":0.0,"));
  EXPECT_EQ(run({"train", "--out", "silu", "--resume", "--steps", "3"}).err, "");
  expect_refused({"train", "--from", "silu/checkpoint", "--shards", "silu/shards", "--out", "x",
                  "--l1", "1e-4"},
                 "--l1 makes no layer sparse with silu, which leaves no zeros: add --relufy, or "
                 "leave --l1 out");
  write(
      "silu/checkpoint/tokenizer_config.json",
      R"({"chat_template": "{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}"})");
  const std::vector<std::string> sparsify = {"train",
                                             "--from",
                                             "silu/checkpoint",
                                             "--shards",
                                             "silu/shards",
                                             "--out",
                                             "sparse",
                                             "--relufy",
                                             "--relufy-steps",
                                             "2",
                                             "--distill",
                                             "0.5",
                                             "--steps",
                                             "4",
                                             "--micro-batch",
                                             "2",
                                             "--threads",
                                             "1",
                                             "--l1",
                                             "1e-3",
                                             "--l1-ramp-steps",
                                             "2",
                                             "--sequence-length",
                                             "16",
                                             "--tasks",
                                             "piqa,arc_easy",
                                             "--task-data",
                                             TWELL_SOURCE_DIR "/tests/golden/tasks/data"};
  const Result sparsified = run(sparsify);
  ASSERT_EQ(sparsified.code, 0) << sparsified.err;
  EXPECT_THAT(sparsified.out, HasSubstr("original       sparse"));
  EXPECT_THAT(slurp(folder_ / "sparse" / "metrics.jsonl"), HasSubstr("\"kl\""));
  const auto side_by_side = nlohmann::json::parse(slurp(folder_ / "sparse" / "side_by_side.json"));
  for (const char* const name : {"piqa", "arc_easy"}) {
    const nlohmann::json& task = side_by_side["tasks"][name];
    const double before = task["original"]["acc_norm"], after = task["sparse"]["acc_norm"];
    const int items = task["items"];
    EXPECT_THAT(sparsified.out,
                HasSubstr(fmt::format("{:<16} {:>12.2f} {:>12.2f}  % acc_norm of {}  ± {:.2f}\n",
                                      name, 100.0 * before, 100.0 * after, items,
                                      100.0 * std::sqrt(after * (1.0 - after) / (items - 1)))));
  }
  EXPECT_GT(side_by_side["tasks"]["arc_easy"]["items"], 0);
  EXPECT_TRUE(side_by_side["tasks"]["piqa"]["original"].contains("acc_norm"));
  EXPECT_THAT(slurp(folder_ / "sparse" / "checkpoint" / "config.json"),
              HasSubstr("\"hidden_act\": \"relu\""));

  const auto convert = [this](const std::string& in, const std::string& out,
                              const std::string& layout) {
    return run({"convert", "--checkpoint", in, "--out", out, "--layout", layout}).code;
  };
  EXPECT_EQ(convert("sparse/checkpoint", "published", "sparse"), 0);
  EXPECT_EQ(convert("published", "back", "hf"), 0);
  EXPECT_EQ(slurp(folder_ / "back" / "config.json"),
            slurp(folder_ / "sparse" / "checkpoint" / "config.json"));
  EXPECT_EQ(slurp(folder_ / "back" / "model.safetensors"), weights("sparse"));
  const Result answer = run({"generate", "--checkpoint", "back", "--chat", "--prompt", "a",
                             "--system", "b", "--max-tokens", "3", "--json"});
  EXPECT_EQ(answer.code, 0) << answer.err;
  EXPECT_THAT(answer.out, HasSubstr("\"prompt\":\"s:b u:a \""));

  // Each line of a conversation is answered with all earlier lines as context.
  const auto continued = [this](const std::string& prompt) {
    const Result result = run({"generate", "--checkpoint", "back", "--prompt", prompt,
                               "--max-tokens", "1", "--temperature", "0"});
    return result.out.substr(prompt.size(), result.out.size() - prompt.size() - 1);
  };
  const std::string first = continued("u:a "), second = continued("u:a a:" + first + " u:b ");
  write("stdin", "a\n\nb");
  const Result talk = run(
      {"generate", "--checkpoint", "back", "--chat", "--max-tokens", "1", "--temperature", "0"});
  EXPECT_EQ(talk.code, 0) << talk.err;
  EXPECT_EQ(talk.out, first + "\n" + second + "\n");

  // On a terminal, lines that arrive together are one message, and Ctrl-C ends an answer only.
  const std::string pasted = "> a\r\nb\r\n" + continued("u:a\nb ") + "\r\n> ";
  EXPECT_THAT(run_in_terminal(80,
                              {"generate", "--checkpoint", "back", "--chat", "--max-tokens", "1",
                               "--temperature", "0"},
                              {"a\nb\n", "\4"}),
              HasSubstr(pasted));
  const std::string stopped = run_in_terminal(
      80,
      {"generate", "--checkpoint", "back", "--chat", "--max-tokens", "16000", "--temperature", "0"},
      {"a\n", "\3", "\4"});
  EXPECT_THAT(stopped, ContainsRegex("> a\r\n[^>]*\\^C[^>]*> "));

  expect_refused({"convert", "--checkpoint", "silu/checkpoint", "--out", "x", "--layout", "sparse"},
                 "this one has silu");
  expect_refused({"convert", "--checkpoint", "back", "--out", "published"}, "published exists");
  expect_refused(train("x", {"--relufy"}), "add --from DIR");
  expect_refused(train("x", {"--tasks", "piqa"}), "--tasks goes with --relufy");
  for (const std::string option : {"--pre-tokenizer=llama3", "--tokenizer-sample=3"}) {
    expect_refused(train("x", {"--tokenizer", "back/tokenizer.json", option}),
                   "--tokenizer cannot be combined with " + option.substr(0, option.find('=')));
  }
  expect_refused({"tokenize", "--data", "x.txt", "--out", "x", "--tokenizer", "back/tokenizer.json",
                  "--vocab-size", "300"},
                 "--tokenizer cannot be combined with --vocab-size");
  expect_refused(train("x", {"--task-limit", "3"}), "--task-limit goes with --tasks");
  expect_refused(train("x", {"--task-data", "."}), "--task-data goes with --tasks");
  expect_refused({"train", "--from", "back", "--shards", "silu/shards", "--out", "y", "--relufy"},
                 "has relu already");
  expect_refused({"generate", "--checkpoint", "back", "--system", "x"},
                 "--system goes with --chat");
}

// A finished run resumed with more steps continues with its original warm-up.
TEST_F(CliTest, AFinishedRunGoesOnWithMoreSteps) {
  ASSERT_EQ(run(train("a", {"--steps", "10"})).code, 0);
  const Result longer = run({"train", "--out", "a", "--resume", "--steps", "40"});
  EXPECT_EQ(longer.code, 0) << longer.err;
  EXPECT_THAT(longer.out, HasSubstr("finished after 40 of 40 steps"));
  fs::path state = folder_ / "a" / "checkpoint" / "trainer" / "state.json";
  std::ofstream(state) << "{\"format\": ";
  const Result damaged = run({"train", "--out", "a", "--resume", "--steps", "50"});
  EXPECT_EQ(damaged.code, 2);
  EXPECT_THAT(damaged.err, testing::Not(HasSubstr("json.exception")));
}

}  // namespace
