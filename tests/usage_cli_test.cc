// SPDX-License-Identifier: Apache-2.0
// The built command as a user meets it: flags, help, terminals, signals, streams that break. Every
// fault must give exit code 2 and one line on stderr.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/test_command.h"

namespace {

namespace fs = std::filesystem;
using testing::ContainsRegex;
using testing::HasSubstr;
using twell::slurp;

class UsageCliTest : public twell::RunTest {};

TEST_F(UsageCliTest, BadNumbers) {
  const auto refused = [&](const std::string& flag, const std::string& value,
                           const std::string& fault) {
    expect_refused({"train", "--dry-run", flag, value}, fault);
  };
  refused("--steps", "0", "steps");
  refused("--steps", "-5", "-5");
  refused("--steps", "many", "--steps");
  refused("--tokens", "0", "--tokens");
  refused("--lr", "nan", "--lr must be");
  refused("--lr", "-1", "--lr must be");
  refused("--l1", "inf", "--l1 must be");
  refused("--micro-batch", "0", "micro-batch");
  refused("--batch-tokens", "1000", "not a multiple");
  refused("--sequence-length", "1000000", "context");
  refused("--width", "-8", "-8");
  refused("--width", "1000000000000", "1000000000000");
  refused("--heads", "7", "heads");
  refused("--vocab-size", "0", "0");
  refused("--keep-last", "0", "--keep-last");
  refused("--val-fraction", "2", "--val-fraction");
  refused("--threads", "-1", "--threads");
  refused("--seed", "-1", "--seed");
  refused("--preset", "3b", "3b");
  refused("--device", "tpu", "tpu");
  refused("--ffn-policy", "fast", "--ffn-policy");
  refused("--unknown", "1", "--unknown");
  expect_refused({"train", "--data", "text", "--out", "x", "--layers", "65000"}, "memory");
  expect_refused({"bench", "ffn", "--tokens", "99999999999999"}, "memory");
  expect_refused({"bench", "ffn", "--width", "0"}, "--width must be at least 1, got 0");
  expect_refused({"bench", "ffn", "--ffn", "-8"}, "--ffn must be at least 1, got -8");
  expect_refused({"bench", "forward", "--preset", "2b", "--batch", "65536"}, "memory");
  expect_refused({"bench", "decode", "--preset", "2b", "--batch", "99999", "--device", "cpu"},
                 "memory");
  expect_refused({"bench", "forward", "--preset", "tiny", "--sequence-length", "99999999999"},
                 "--sequence-length must");
  expect_refused({}, "no command");
  expect_refused({"trian"}, "trian");
  EXPECT_FALSE(fs::exists(folder_ / "x"));
}

TEST_F(UsageCliTest, DecodingIsTimedWithoutAGpu) {
  const Result result =
      run({"bench", "decode", "--preset", "tiny", "--device", "cpu", "--batch", "1", "3",
           "--prompt-tokens", "8", "--tokens", "3", "--jsonl", "rows.jsonl"});
  EXPECT_EQ(result.code, 0) << result.err;
  std::ifstream rows(folder_ / "rows.jsonl");
  for (const int batch : {1, 3}) {
    std::string line;
    ASSERT_TRUE(std::getline(rows, line));
    const nlohmann::json row = nlohmann::json::parse(line);
    EXPECT_EQ(row["batch"], batch);
    EXPECT_GT(row["sparse_tokens_per_s"].get<double>(), 0.0);
    EXPECT_GT(row["dense_share_of_bound"].get<double>(), 0.0);
  }
}

// Prompts generated together give the same texts as each alone, in their order.
TEST_F(UsageCliTest, GeneratesForManyPrompts) {
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
  // A signal ends the command with partial results: every prompt still has its line.
  std::string many;
  for (int i = 0; i < 20000; ++i) many += "a\n";
  write("many.txt", many);
  fs::remove(folder_ / "stdout");  // from the previous run
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

// A signal leaves no partially written files.
TEST_F(UsageCliTest, SignalsEndCommandsThatWriteFiles) {
  std::string line(999, 'a');
  for (size_t i = 0; i < line.size(); i += 7) line[i] = ' ';
  std::ofstream text(folder_ / "long.txt");
  for (int i = 0; i < 60000; ++i) text << line << "\n";
  text.close();
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const pid_t child = start({"tokenize", "--data", "long.txt", "--out", "shards", "--tokenizer",
                               golden("tasks/model/tokenizer.json"), "--threads", "1"});
    const auto begun = [&] {
      return std::any_of(fs::directory_iterator(folder_), fs::directory_iterator(),
                         [](const fs::directory_entry& entry) {
                           return entry.path().string().find("shards") != std::string::npos;
                         });
    };
    for (int i = 0; i < 3000 && !begun(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    ::kill(child, signal);
    EXPECT_EQ(finish(child).code, 128 + signal);
    EXPECT_FALSE(begun());
  }
}

TEST_F(UsageCliTest, LostOutputIsAFailure) {
  const std::vector<std::vector<std::string>> commands = {
      {"--help"},
      {"eval", "--help"},
      {"--version"},
      {"doctor", "--json"},
      {"completion", "bash"},
      {"train", "--dry-run"},
      {"generate", "--checkpoint", golden("tasks/model"), "--prompt", "a", "--max-tokens", "2",
       "--quiet"},
      {"generate", "--checkpoint", golden("tasks/model"), "--prompt", "a", "--max-tokens", "2",
       "--json"},
      {"eval", "--checkpoint", golden("tasks/model"), "--data", "text", "--max-tokens", "50"},
      {"inspect", "--checkpoint", golden("tasks/model"), "--json"},
  };
  for (const std::vector<std::string>& command : commands) {
    const int full = ::open("/dev/full", O_WRONLY);
    const Result lost = finish(start(command, full));
    ::close(full);
    EXPECT_EQ(lost.code, 1) << command[0];
    EXPECT_THAT(lost.err, HasSubstr("cannot write to standard output: No space left on device"))
        << command[0];
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    ::close(ends[0]);
    const Result closed = finish(start(command, ends[1]));
    ::close(ends[1]);
    EXPECT_EQ(closed.code, 1) << command[0];
    EXPECT_THAT(closed.err, testing::Not(HasSubstr("error"))) << command[0];
  }
}

// Standard error is on a full disk.
TEST_F(UsageCliTest, LostErrorMessagesChangeNoExitCode) {
  fs::create_symlink("/dev/full", folder_ / "stderr");
  const auto code = [&](const std::vector<std::string>& arguments) {
    int status = 0;
    ::waitpid(start(arguments), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  };
  EXPECT_EQ(code({"eval", "--checkpoint", "missing", "--data", "text"}), 2);
  EXPECT_EQ(code({"train", "--stpes", "1"}), 2);
  EXPECT_EQ(code({"generate", "--checkpoint", golden("tasks/model"), "--prompt", "a",
                  "--max-tokens", "2"}),
            0);
}

TEST_F(UsageCliTest, PathsThatNameNoFileOrFolder) {
  fs::create_symlink("loop", folder_ / "loop");
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  const std::string loop = "Too many levels of symbolic links";
  expect_refused({"eval", "--checkpoint", "loop", "--data", "text"}, loop);
  expect_refused({"report", "--out", "loop"}, loop);
  expect_refused(train("loop"), loop);
  expect_refused({"tokenize", "--data", "text", "--vocab-size", "300", "--out", "pipe"}, "pipe");
  const Result bench = run({"bench", "ffn", "--tokens", "1", "--width", "8", "--ffn", "16",
                            "--threads", "1", "--jsonl", "pipe"});
  EXPECT_EQ(bench.code, 2);
  EXPECT_THAT(bench.err, HasSubstr("cannot write pipe"));
  // An option whose value is missing, because a shell variable is not set, must not count as
  // absent.
  expect_refused(
      {"serve", "--checkpoint", golden("tasks/model"), "--port", "0", "--api-key-file", ""},
      "--api-key-file must be a path, got ''");
  expect_refused({"eval", "--checkpoint", golden("tasks/model"), "--data", ""},
                 "--data must be a path");
}

// Progress lines are made for the terminal's width, and what the terminal echoes is overwritten.
TEST_F(UsageCliTest, ProgressFollowsTheTerminal) {
  const std::string out = run_in_terminal(60, train("a", {"--steps", "8"}));
  size_t lines = 0;
  for (size_t at = out.find("\rstep "); at != std::string::npos; at = out.find("\rstep ", at + 1)) {
    const size_t end = out.find("\x1b[K", at);
    ASSERT_NE(end, std::string::npos);
    EXPECT_LT(end - at - 1, 60u) << out.substr(at + 1, end - at - 1);
    EXPECT_NE(out[end - 1], '.') << "cut: " << out.substr(at + 1, end - at - 1);
    EXPECT_TRUE(out[end + 3] == '\r' || out[end + 3] == '\n') << "the cursor stays at the end";
    ++lines;
  }
  EXPECT_GT(lines, 0u);
}

// A terminal shows the columns that fit and names the others; a pipe gets all.
TEST_F(UsageCliTest, TablesFollowTheTerminal) {
  fs::create_directory_symlink(golden("tasks/model"), folder_ / "model");
  const std::vector<std::vector<std::string>> tables = {
      {"inspect", "--checkpoint", "model", "--data", "text", "--max-tokens", "200"},
      {"bench", "forward", "--checkpoint", "model", "--data", "text", "--batch", "1", "--repeats",
       "1"},
      {"bench", "ffn", "--width", "16", "--ffn", "32", "--tokens", "4", "--repeats", "1"},
      {"doctor"}};
  for (const std::vector<std::string>& arguments : tables) {
    std::istringstream lines(run_in_terminal(80, arguments));
    for (std::string line; std::getline(lines, line);) {
      EXPECT_LE(line.size(), 81u) << line;  // with a carriage return
    }
  }
  EXPECT_THAT(run_in_terminal(80, tables[0]),
              HasSubstr("Wider terminals and pipes also get: p50, max, union 64, union 128."));
  for (const std::string& wide : {run_in_terminal(120, tables[0]), run(tables[0]).out}) {
    EXPECT_THAT(wide, HasSubstr("union 128"));
    EXPECT_THAT(wide, testing::Not(HasSubstr("also get")));
  }
  EXPECT_THAT(run(tables[1]).out, HasSubstr("neurons active per token"));
}

TEST_F(UsageCliTest, WrongFlagsArePlainlyNamed) {
  expect_refused({"train", "--setps", "5"}, "unknown option --setps; did you mean --steps?");
  expect_refused({"train", "--xyzzy"}, "unknown option --xyzzy; 'twell train --help' lists them");
  expect_refused({"trian"}, "unknown command 'trian'; did you mean train?");
  expect_refused({"evaluate", "--data", "x"}, "unknown command 'evaluate'; did you mean eval?");
  expect_refused({"gen"}, "did you mean generate?");
  expect_refused({"xyzzy"}, "unknown command 'xyzzy'; the commands are train, generate, serve");
  expect_refused({"train", "--micro"}, "did you mean --micro-batch?");
  expect_refused({"train", "--steps", "3", "--tokens", "5"},
                 "--steps cannot be combined with --tokens");
  expect_refused({"bench"}, "no command given; 'twell bench --help' lists them");
  expect_refused({"bench", "frward"}, "did you mean forward?");
  expect_refused({"train", "stray"}, "unexpected word 'stray' behind 'twell train'");
  expect_refused({"train", "--steps"}, "--steps needs a value");
  expect_refused({"eval"}, "--checkpoint is required");
  expect_refused({"train", "--dry-run", "--steps", "1.5"}, "--steps must be a whole number");
  expect_refused({"train", "--dry-run", "--steps", "9e99"}, "--steps 9e99 is too large");
  expect_refused({"train", "--dry-run", "--lr", "1e999"}, "--lr must be a number");
  expect_refused({"train", "--dry-run", "--lr", "0"}, "--lr must be above 0 and at most 10");
  expect_refused({"train", "--dry-run", "--threads", "9999"}, "--threads must be 0 to 4096");
  expect_refused({"train", "--dry-run", "--max-data-bytes", "-1"}, "must be at least 0, got -1");
  expect_refused({"train", "--dry-run", "--width", "0"}, "--width must be");
  expect_refused({"train", "--dry-run", "--ffn", "0"}, "--ffn must be");
  expect_refused({"train", "--dry-run", "--save-dtype", "f8"}, "must be f32, bf16 or f16");
  for (const char* command : {"train", "tokenize", "generate", "eval", "inspect", "bench"}) {
    const std::string help = run({command, "--help"}).out;
    for (const char* jargon : {"NONNEGATIVE", "FLOAT in", "{error,skip}", "e+308"}) {
      EXPECT_THAT(help, testing::Not(HasSubstr(jargon))) << command;
    }
  }
  expect_refused({"bench", "ffn", "stray"}, "unexpected word 'stray' behind 'twell bench ffn'");
  // One option may take several values.
  expect_refused(
      {"bench", "decode", "--checkpoint", "none", "--device", "cpu", "--batch", "1", "8"}, "none");
  expect_refused({"bench", "decode", "--checkpoint", "none", "--kv-heads", "4"},
                 "--kv-heads changes a preset");
  // The last of two values wins, and a log line reports it.
  const Result twice = run({"train", "--dry-run", "--steps", "5", "--steps", "6"});
  EXPECT_EQ(twice.code, 0);
  EXPECT_THAT(twice.err, HasSubstr("--steps was given twice"));
  EXPECT_THAT(twice.out, ContainsRegex("steps +6\n"));
  // Large numbers in shorter notations.
  const auto steps = [&](const std::string& text) {
    return run({"train", "--dry-run", "--steps", text}).out;
  };
  EXPECT_THAT(steps("1e6"), ContainsRegex("steps +1000000\n"));
  EXPECT_EQ(steps("1M"), steps("1e6"));
  EXPECT_EQ(steps("2.5k"), steps("2500"));
  EXPECT_EQ(run({"-V"}).out, run({"--version"}).out);
}

TEST_F(UsageCliTest, CompletesInEveryShell) {
  for (const char* shell : {"bash", "zsh", "fish"}) {
    const Result script = run({"completion", shell});
    EXPECT_EQ(script.code, 0) << script.err;
    for (const char* word :
         {"tokenize", "save-dtype", "f32 bf16 f16", "no-gated", "energy-seconds"}) {
      EXPECT_THAT(script.out, HasSubstr(word)) << shell;
    }
    write(std::string("completion.") + shell, script.out);
  }
  expect_refused({"completion", "csh"}, "must be bash, zsh or fish");
  write("complete.sh",
        "source completion.bash\n"
        "ask() { COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); _twell; echo \"${COMPREPLY[*]}\"; }\n"
        "ask twell tok; ask twell train --save-dtype b; ask twell bench ffn --energy\n"
        "ask twell train --data tex; ask twell train --preset t; ask twell train --schedule w\n"
        "ask twell generate --ffn d; ask twell train --activation re\n");
  const std::string answers = (folder_ / "answers").string();
  ASSERT_EQ(std::system(("cd " + folder_.string() + " && bash complete.sh > " + answers).c_str()),
            0);
  EXPECT_EQ(slurp(answers),
            "tokenize\nbf16\n--energy-seconds\ntext\ntiny\nwsd\ndense\nrelu relu2\n");
}

TEST_F(UsageCliTest, StandardInputAndRunFolders) {
  write("stdin", slurp(folder_ / "text" / "1.txt") + slurp(folder_ / "text" / "2.txt"));
  const Result tokenized = run({"tokenize", "--data", "-", "--out", "shards", "--vocab-size", "300",
                                "--val-fraction", "0.5"});
  // One document cannot be split into training and validation, but it was found and read.
  EXPECT_THAT(tokenized.out + tokenized.err, testing::Not(HasSubstr("no such")));
  ASSERT_EQ(run(train("run", {"--steps", "2"})).code, 0);
  const auto generate = [&](const std::string& checkpoint, const std::string& flag,
                            const std::string& value) {
    const Result result = run({"generate", "--checkpoint", checkpoint, flag, value, "--max-tokens",
                               "3", "--temperature", "0", "--quiet"});
    EXPECT_EQ(result.code, 0) << result.err;
    return result.out;
  };
  write("stdin", "int x");
  const std::string text = generate("run/checkpoint", "--prompt", "int x");
  EXPECT_EQ(generate("run", "--prompt", "int x"), text);
  EXPECT_EQ(generate("run", "--prompt-file", "-"), text);
  write("stdin", slurp(folder_ / "text" / "1.txt"));
  const Result piped = run({"eval", "--checkpoint", "run", "--data", "-", "--json"});
  ASSERT_EQ(piped.code, 0) << piped.err;
  const Result named = run({"eval", "--checkpoint", "run", "--data", "text/1.txt", "--json"});
  EXPECT_EQ(nlohmann::json::parse(piped.out)["cross_entropy"],
            nlohmann::json::parse(named.out)["cross_entropy"]);
}

// --compute bf16 where the processor multiplies it; elsewhere it is refused, and nothing is made.
TEST_F(UsageCliTest, ComputesInBf16WhereTheProcessorDoes) {
  const std::vector<std::string> eval = {"eval",         "--checkpoint", golden("tasks/model"),
                                         "--data",       "text/1.txt",   "--json",
                                         "--max-tokens", "400",          "--device",
                                         "cpu"};
  const auto with = [](std::vector<std::string> arguments, const std::string& compute) {
    arguments.insert(arguments.end(), {"--compute", compute});
    return arguments;
  };
  expect_refused(with(eval, "int8"), "--compute");
  const bool has = slurp("/proc/cpuinfo").find(" avx512_bf16 ") != std::string::npos;
  EXPECT_EQ(nlohmann::json::parse(run({"doctor", "--json"}).out)["compute_bf16"], has);
  if (!has) {
    const std::string fault =
        "this processor has no products of bf16 (AVX512_BF16 or AMX), and emulated ones would be "
        "slower than f32: compute in f32, the default";
    expect_refused(with(eval, "bf16"), fault);
    expect_refused(with(train("run", {"--steps", "2", "--device", "cpu"}), "bf16"), fault);
    EXPECT_FALSE(fs::exists(folder_ / "run"));
    return;
  }
  const auto cross_entropy = [&](const std::string& compute) {
    const Result result = run(with(eval, compute));
    EXPECT_EQ(result.code, 0) << result.err;
    return nlohmann::json::parse(result.out)["cross_entropy"].get<double>();
  };
  const double exact = cross_entropy("f32"), rounded = cross_entropy("bf16");
  EXPECT_NE(rounded, exact);
  EXPECT_NEAR(rounded, exact, 1e-3 * exact);
}

// Prompts that do not fit are named, and the others are answered.
TEST_F(UsageCliTest, APromptThatDoesNotFit) {
  ASSERT_EQ(run(train("one", {"--steps", "2"})).code, 0);
  write("prompts.txt", "a\n" + std::string(200, 'x') + "\nb\n");
  const Result some = run({"generate", "--checkpoint", "one", "--prompts", "prompts.txt",
                           "--max-tokens", "2", "--json"});
  EXPECT_EQ(some.code, 2);
  EXPECT_THAT(some.err, HasSubstr("twell: error: prompts.txt line 2 has "));
  EXPECT_EQ(std::count(some.out.begin(), some.out.end(), '\n'), 2);
  EXPECT_THAT(some.out, HasSubstr("\"prompt\":\"b\""));
  expect_refused({"generate", "--checkpoint", "one", "--prompt", std::string(200, 'x')},
                 "the prompt has ");
  const auto line = nlohmann::json::parse(some.out.substr(0, some.out.find('\n')));
  EXPECT_EQ(line["ids"].size(), line["tokens"]);
  EXPECT_FALSE(line.contains("log_probs"));

  // The most likely of at most 300 tokens has a probability between 1/300 and 1.
  const Result scored = run({"generate", "--checkpoint", "one", "--prompt", "a", "--max-tokens",
                             "3", "--temperature", "0", "--json", "--log-probs"});
  ASSERT_EQ(scored.code, 0) << scored.err;
  const auto log_probs = nlohmann::json::parse(scored.out)["log_probs"];
  ASSERT_EQ(log_probs.size(), 3u);
  for (const auto& value : log_probs) {
    EXPECT_GE(value.get<double>(), std::log(1.0 / 300.0));
    EXPECT_LT(value.get<double>(), 0.0);
  }
  expect_refused({"generate", "--checkpoint", "one", "--prompt", "a", "--log-probs"},
                 "--log-probs needs --json");
}

TEST_F(UsageCliTest, DumpsALayerAndNamesTheFirstStageThatDiffers) {
  const auto dump = [&](const std::string& out, const std::vector<std::string>& more) {
    std::vector<std::string> words = {"dump",
                                      "--checkpoint",
                                      golden("tasks/model"),
                                      "--device",
                                      "cpu",
                                      "--threads",
                                      "1",
                                      "--prompt",
                                      "a cat",
                                      "--out",
                                      out};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  EXPECT_EQ(run(dump("a.safetensors", {"--ffn", "dense"})).code, 0);
  const Result same =
      run(dump("b.safetensors", {"--ffn", "row-fused", "--against", "a.safetensors"}));
  EXPECT_EQ(same.code, 0) << same.err;
  EXPECT_THAT(same.out, HasSubstr("every stage is within"));
  const Result strict = run(dump(
      "c.safetensors", {"--ffn", "row-fused", "--against", "a.safetensors", "--tolerance", "0"}));
  EXPECT_TRUE(strict.code == 0 || strict.out.find("more than 0: ffn\n") != std::string::npos)
      << strict.out;
  expect_refused(dump("d.safetensors", {"--layer", "99"}), "layer 99 of a model with layers 0 to");
  expect_refused(dump("d.safetensors", {"--layer", "1", "--against", "a.safetensors"}),
                 "a.safetensors is no dump of layer 1");
  std::vector<std::string> other = dump("d.safetensors", {"--against", "a.safetensors"});
  std::ranges::replace(other, std::string("a cat"), std::string("a dog"));
  expect_refused(other, "other tokens");
}

TEST_F(UsageCliTest, HelpOfEveryCommand) {
  const Result all = run({"--help"});
  EXPECT_EQ(all.code, 0);
  EXPECT_THAT(all.out, HasSubstr("Usage: twell [OPTIONS] COMMAND\n"));
  for (const char* command : {"train", "tokenize", "generate", "eval", "inspect", "convert",
                              "bench", "report", "doctor", "dump", "completion"}) {
    EXPECT_THAT(all.out, HasSubstr(command));
    const Result help = run({command, "--help"});
    EXPECT_EQ(help.code, 0) << command;
    std::istringstream lines(help.out);
    for (std::string line; std::getline(lines, line);) {
      // Commands to copy stay on one line.
      const bool copied = line.starts_with("  twell ") || line.starts_with("  torchrun ");
      EXPECT_TRUE(copied || line.size() <= 80U) << command << ": " << line;
    }
    EXPECT_THAT(help.out, testing::Not(HasSubstr("\n\n\n"))) << command;
  }
  EXPECT_THAT(run({"train", "--help"}).out, HasSubstr("--gated,--no-gated "));
  EXPECT_THAT(run({"eval", "--help"}).out, HasSubstr("(with --tasks)"));
  expect_refused({"completion"}, "SHELL is required: bash, zsh or fish");
  expect_refused({"inspect", "--checkpoint", "nowhere"}, "nowhere does not exist");
  expect_refused({"inspect", "--checkpoint", golden("tasks/model"), "--html", "nowhere/page.html"},
                 "cannot write nowhere/page.html");
}

}  // namespace
