// SPDX-License-Identifier: Apache-2.0
// The built command, run as a user runs it: training, resuming, killing, and bad input, each fault
// of which gives exit code 2 and one line on stderr.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
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

class CliTest : public twell::CommandTest {
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

  // A run of a micro model; later flags win only where these have none.
  static std::vector<std::string> train(const std::string& out,
                                        const std::vector<std::string>& more = {}) {
    std::vector<std::string> words = {"train", "--data",        "text", "--out",
                                      out,     "--width",       "16",   "--ffn",
                                      "48",    "--layers",      "1",    "--heads",
                                      "2",     "--context",     "16",   "--vocab-size",
                                      "300",   "--micro-batch", "2",    "--validation-sequences",
                                      "4",     "--threads",     "1"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  // The first file of tokens in a folder of shards.
  fs::path shard_file(const std::string& shards) const {
    for (const fs::directory_entry& entry : fs::directory_iterator(folder_ / shards)) {
      if (entry.path().extension() != ".json") return entry.path();
    }
    ADD_FAILURE() << "no shard in " << shards;
    return {};
  }
  std::string weights(const std::string& run) const {
    return slurp(folder_ / run / "checkpoint" / "model.safetensors");
  }
  // Waits until the run has logged `lines` steps; then `signal`.
  Result signal_after(pid_t child, const std::string& run, int lines, int signal) const {
    for (int i = 0; i < 3000; ++i) {
      const std::string metrics = slurp(folder_ / run / "metrics.jsonl");
      if (std::count(metrics.begin(), metrics.end(), '\n') >= lines) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
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

TEST_F(CliTest, ReportsARunWithABenchmarkOfEitherDevice) {
  ASSERT_EQ(run(train("r", {"--steps", "4", "--validate-every", "2"})).code, 0);
  const Result plain = run({"report", "--out", "r"});
  EXPECT_EQ(plain.code, 0) << plain.err;
  EXPECT_THAT(plain.out, testing::Not(HasSubstr("forward")));
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
  write("r/bench.jsonl", "{}\n");
  expect_refused({"report", "--out", "r"}, "bench.jsonl is not as this version writes it");
}

TEST_F(CliTest, InterruptedAndKilledRunsResumeToTheSameWeights) {
  const std::vector<std::string> options = {"--steps",          "300", "--save-every", "20",
                                            "--validate-every", "0"};
  ASSERT_EQ(run(train("whole", options)).code, 0);

  const Result stopped = signal_after(start(train("int", options)), "int", 30, SIGTERM);
  EXPECT_EQ(stopped.code, 130) << stopped.err;
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
  expect_refused({"train", "--out", "a", "--resume", "--width", "32"}, "another model");
  expect_refused(train("text/1.txt", {"--steps", "2"}), "text/1.txt");
  expect_refused(train("", {"--steps", "2"}), "--out");
  EXPECT_EQ(weights("a"), before);

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

TEST_F(CliTest, BadNumbers) {
  const auto refused = [&](const std::string& flag, const std::string& value,
                           const std::string& fault) {
    expect_refused({"train", "--dry-run", flag, value}, fault);
  };
  refused("--steps", "0", "steps");
  refused("--steps", "-5", "-5");
  refused("--steps", "many", "--steps");
  refused("--tokens", "0", "--tokens");
  refused("--lr", "nan", "learning rate");
  refused("--lr", "-1", "learning rate");
  refused("--l1", "inf", "L1");
  refused("--micro-batch", "0", "micro-batch");
  refused("--batch-tokens", "1000", "not a multiple");
  refused("--sequence-length", "1000000", "context");
  refused("--width", "-8", "-8");
  refused("--width", "1000000000000", "1000000000000");
  refused("--heads", "7", "heads");
  refused("--vocab-size", "0", "0");
  refused("--keep-last", "0", "keep last");
  refused("--val-fraction", "2", "--val-fraction");
  refused("--threads", "-1", "--threads");
  refused("--seed", "-1", "--seed");
  refused("--preset", "3b", "3b");
  refused("--device", "cuda", "cuda");
  refused("--device", "tpu", "tpu");
  refused("--ffn-policy", "fast", "--ffn-policy");
  refused("--unknown", "1", "--unknown");
  expect_refused({"train", "--data", "text", "--out", "x", "--layers", "65000"}, "memory");
  expect_refused({"bench", "ffn", "--tokens", "99999999999999"}, "memory");
  expect_refused({"bench", "ffn", "--width", "0"}, "--width and --ffn must be positive");
  expect_refused({"bench", "ffn", "--ffn", "-8"}, "--width and --ffn must be positive");
  expect_refused({"bench", "forward", "--preset", "2b", "--batch", "65536"}, "memory");
  expect_refused({"bench", "forward", "--preset", "tiny", "--sequence-length", "99999999999"},
                 "--sequence-length must");
  expect_refused({}, "no command");
  expect_refused({"trian"}, "trian");
  EXPECT_FALSE(fs::exists(folder_ / "x"));
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
  // In quotes '#' begins no comment and brackets no list.
  write("#1 [a].txt", "text");
  write("quoted.toml",
        "[run]\ndata = [\"text\", \"#1 [a].txt\"] # both\nout = \"run #1\"\nsteps = 1\n");
  EXPECT_EQ(run({"train", "--config", "quoted.toml", "--width", "16", "--ffn", "48", "--layers",
                 "1", "--heads", "2", "--context", "16", "--vocab-size", "300", "--threads", "1"})
                .code,
            0);
  EXPECT_TRUE(fs::exists(folder_ / "run #1" / "checkpoint"));

  refused("b.json", R"({"widht": 64})", "unknown key 'widht'");
  refused("b.toml", "widht = 64\n", "unknown key 'widht'");
  refused("b.json", R"({"width": 64, "width": 32})", "width");
  refused("b.toml", "width = 64\nsteps = 3\nwidth = 32\n", "width");
  refused("b.toml", "width = 64\nsteps 3\n", "b.toml:2: ");
  refused("b.toml", "steps = 1979-05-27\n", "steps must be a string, number or boolean");
  refused("b.toml", "lr = inf\n", "got inf");
  refused("b.json", R"({"steps": "many"})", "steps");
  refused("b.json", R"({"steps": )", "b.json");
  refused("b.json", R"({"dry-run": true})", "dry-run");
  expect_refused({"train", "--dry-run", "--config", "missing.toml"}, "missing.toml");
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

  // Another token of the vocabulary: only the checksum can tell.
  const fs::path shard = shard_file("shards");
  std::string bytes = slurp(shard);
  bytes[0] = static_cast<char>(bytes[0] ^ 1);
  std::ofstream(shard, std::ios::binary) << bytes;
  expect_refused({"tokenize", "--verify", "shards"}, shard.filename().string() + " was altered");
}

// A model with SiLU gates becomes a sparse one, is converted there and back, and answers a message.
TEST_F(CliTest, SparsifyConvertAndChat) {
  auto with_silu =
      train("silu", {"--activation", "silu", "--steps", "2", "--sequence-length", "16"});
  *std::next(std::find(with_silu.begin(), with_silu.end(), "--context")) = "512";
  ASSERT_EQ(run(with_silu).code, 0);
  write(
      "silu/checkpoint/tokenizer_config.json",
      R"({"chat_template": "{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}"})");
  const std::vector<std::string> sparsify = {
      "train",
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
      std::string(TWELL_SOURCE_DIR) + "/tests/golden/tasks/data"};
  const Result sparsified = run(sparsify);
  ASSERT_EQ(sparsified.code, 0) << sparsified.err;
  EXPECT_THAT(sparsified.out, HasSubstr("original       sparse"));
  EXPECT_THAT(slurp(folder_ / "sparse" / "metrics.jsonl"), HasSubstr("\"kl\""));
  EXPECT_THAT(sparsified.out, ContainsRegex("piqa +[0-9.]+ +[0-9.]+  % acc_norm of"));
  const auto side_by_side = nlohmann::json::parse(slurp(folder_ / "sparse" / "side_by_side.json"));
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

  // A conversation: each line is answered with all before it in view.
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

  expect_refused({"convert", "--checkpoint", "silu/checkpoint", "--out", "x", "--layout", "sparse"},
                 "this one has silu");
  expect_refused({"convert", "--checkpoint", "back", "--out", "published"}, "published exists");
  expect_refused(train("x", {"--relufy"}), "add --from DIR");
  expect_refused(train("x", {"--tasks", "piqa"}), "--tasks goes with --relufy");
  expect_refused({"train", "--from", "back", "--shards", "silu/shards", "--out", "y", "--relufy"},
                 "has relu already");
  expect_refused({"generate", "--checkpoint", "back", "--system", "x"},
                 "--system goes with --chat");
}

// Prompts that are continued together give what each gives alone, in their order.
TEST_F(CliTest, GeneratesForManyPrompts) {
  ASSERT_EQ(run(train("one", {"--steps", "2"})).code, 0);
  const std::vector<std::string> greedy = {
      "generate", "--checkpoint", "one/checkpoint", "--max-tokens", "4", "--temperature",
      "0",        "--json"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), greedy.begin(), greedy.end());
    return more;
  };
  std::vector<std::string> together = {"--batch", "2"}, texts;
  std::string lines, objects;
  for (const char* prompt : {"a", "the", "b c", "a", "int x"}) {
    together.insert(together.end(), {"--prompt", prompt});
    lines += std::string(prompt) + "\n";
    objects += nlohmann::json{{"prompt", prompt}}.dump() + "\n\n";
    const Result alone = run(with({"--prompt", prompt}));
    ASSERT_EQ(alone.code, 0) << alone.err;
    texts.push_back(nlohmann::json::parse(alone.out)["text"]);
  }
  write("prompts.txt", lines);
  write("prompts.jsonl", objects);
  for (const std::vector<std::string>& given :
       {together, {"--prompts", "prompts.txt"}, {"--prompts", "prompts.jsonl", "--batch", "3"}}) {
    const Result many = run(with(given));
    ASSERT_EQ(many.code, 0) << many.err;
    std::istringstream out(many.out);
    size_t count = 0;
    for (std::string line; std::getline(out, line); ++count) {
      ASSERT_LT(count, texts.size());
      EXPECT_EQ(nlohmann::json::parse(line)["text"], texts[count]) << count;
    }
    EXPECT_EQ(count, texts.size());
  }
  // A signal ends it with what there is: every prompt has its line.
  std::string many;
  for (int i = 0; i < 20000; ++i) many += "a\n";
  write("many.txt", many);
  fs::remove(folder_ / "stdout");  // of the run before
  const pid_t child = start({"generate", "--checkpoint", "one/checkpoint", "--prompts", "many.txt",
                             "--batch", "1", "--max-tokens", "12", "--json"});
  while (slurp(folder_ / "stdout").empty()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ::kill(child, SIGINT);
  const Result stopped = finish(child);
  EXPECT_EQ(stopped.code, 130) << stopped.err;
  EXPECT_EQ(std::count(stopped.out.begin(), stopped.out.end(), '\n'), 20000);
  EXPECT_THAT(stopped.out, testing::EndsWith("\"text\":\"\",\"tokens\":0}\n"));

  write("bad.jsonl", "{\"prompt\": \"a\"}\n{\"text\": 1}\n");
  expect_refused({"generate", "--checkpoint", "one/checkpoint", "--prompts", "bad.jsonl"},
                 "bad.jsonl line 2");
  expect_refused(with({"--prompt", "a", "--batch", "0"}), "--batch must be at least 1");
}

TEST_F(CliTest, HelpOfEveryCommand) {
  const Result all = run({"--help"});
  EXPECT_EQ(all.code, 0);
  EXPECT_THAT(all.out, HasSubstr("Usage: twell [OPTIONS] COMMAND\n"));
  for (const char* command : {"train", "tokenize", "generate", "eval", "inspect", "convert",
                              "bench", "report", "doctor"}) {
    EXPECT_THAT(all.out, HasSubstr(command));
    EXPECT_EQ(run({command, "--help"}).code, 0) << command;
  }
  EXPECT_THAT(run({"train", "--help"}).out, HasSubstr("--gated,--no-gated "));
}

}  // namespace
