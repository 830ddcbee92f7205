// SPDX-License-Identifier: Apache-2.0
// Malformed and malicious checkpoint folders: every command must exit with code 2 and one line on
// stderr, and write nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "tests/test_command.h"
#include "twell/base/file.h"
#include "twell/checkpoint/safetensors.h"

namespace twell {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::HasSubstr;

// A safetensors file made of this header and `bytes` zeros.
std::string safetensors(const std::string& header, size_t bytes) {
  const uint64_t size = header.size();
  std::string out(sizeof(size), '\0');
  std::memcpy(out.data(), &size, sizeof(size));
  return out + header + std::string(bytes, '\0');
}

class HostileCheckpoint : public CommandTest {
 protected:
  // Creates a sharded model, and a model with a tokenizer.
  void SetUp() override {
    fs::copy(golden("families/llama_linear"), folder_ / "sharded");
    fs::copy(golden("tasks/model"), folder_ / "chat");
    fs::copy(golden("tied_gqa"), folder_ / "single");
  }

  void refused(const std::vector<std::string>& arguments, const std::string& fault) const {
    expect_refused(arguments, fault);
    EXPECT_FALSE(fs::exists(folder_ / "out"));
  }
  void convert_refused(const std::string& in, const std::string& fault) const {
    refused({"convert", "--checkpoint", in, "--out", "out"}, fault);
  }
  void chat_refused(const std::string& chat_template, const std::string& fault) const {
    write("chat/chat_template.jinja", chat_template);
    refused({"generate", "--checkpoint", "chat", "--chat", "--prompt", "a", "--max-tokens", "1"},
            fault);
  }
  // Changes the file that the index names for a tensor.
  void point(const std::string& file) const {
    const fs::path path = folder_ / "sharded" / "model.safetensors.index.json";
    json index = json::parse(read_file(path));
    index["weight_map"]["model.norm.weight"] = file;
    write_file_atomic(path, index.dump());
  }
};

TEST_F(HostileCheckpoint, MissingShard) {
  fs::remove(folder_ / "sharded" / "model-00002-of-00002.safetensors");
  convert_refused("sharded", "model-00002-of-00002.safetensors");
}

TEST_F(HostileCheckpoint, PathsOutOfTheFolder) {
  for (const char* file :
       {"../single/model.safetensors", "/etc/passwd", "a/../../b", "..", "", "."}) {
    point(file);
    convert_refused("sharded", "model.safetensors.index.json");
  }
}

TEST_F(HostileCheckpoint, WrongShape) {
  json config = json::parse(read_file(folder_ / "single" / "config.json"));
  config["intermediate_size"] = config["intermediate_size"].get<int64_t>() + 8;
  write("single/config.json", config.dump());
  convert_refused("single", "mlp.");
}

TEST_F(HostileCheckpoint, HeadersOfAbsurdSize) {
  for (const uint64_t size : {uint64_t{1} << 62, uint64_t{1} << 40, ~uint64_t{0}, uint64_t{0}}) {
    std::string file(64, ' ');
    std::memcpy(file.data(), &size, sizeof(size));
    write("single/model.safetensors", file);
    convert_refused("single", "model.safetensors");
  }
}

TEST_F(HostileCheckpoint, ATensorTwice) {
  // A duplicate in one header.
  const std::string entry = R"("a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})";
  write("single/model.safetensors", safetensors("{" + entry + ", " + entry + "}", 4));
  convert_refused("single", "\"a\" appears twice");
  // A duplicate in two shards; the index names one of them.
  const fs::path first = folder_ / "sharded" / "model-00001-of-00002.safetensors";
  const fs::path second = folder_ / "sharded" / "model-00002-of-00002.safetensors";
  fs::copy_file(first, second, fs::copy_options::overwrite_existing);
  convert_refused("sharded", "model-0000");
}

TEST_F(HostileCheckpoint, TensorsBeyondTheFile) {
  write("single/model.safetensors",
        safetensors(R"({"a": {"dtype": "F32", "shape": [4611686018427387904, 4],
                                "data_offsets": [0, 4]}})",
                    4));
  convert_refused("single", "model.safetensors");
}

// Every command reports non-finite weights in the same way, with tensor name and index.
TEST_F(HostileCheckpoint, WeightsThatAreNotFinite) {
  const fs::path path = folder_ / "chat" / "model.safetensors";
  std::map<std::string, std::string> bytes;
  std::vector<TensorToWrite> tensors;
  {
    const SafetensorsFile file(path);
    for (const auto& [name, info] : file.tensors()) {
      bytes[name].assign(reinterpret_cast<const char*>(info.bytes.data()), info.bytes.size());
      tensors.push_back({name, info.dtype, info.shape, [&data = bytes[name]](const auto& sink) {
                           sink(std::as_bytes(std::span(data)));
                         }});
    }
  }
  const std::string name = "model.layers.0.mlp.down_proj.weight";
  const auto tensor = std::find_if(tensors.begin(), tensors.end(),
                                   [&](const TensorToWrite& t) { return t.name == name; });
  ASSERT_EQ(tensor->dtype, "BF16");
  const uint16_t infinite = 0x7f80;
  const int64_t cols = tensor->shape[1];
  std::memcpy(bytes[name].data() + 2 * (2 * cols + 3), &infinite, sizeof(infinite));
  write_safetensors(path, tensors, {});
  const std::string fault = "tensor " + name + " has the value inf at [2, 3]";
  write("text.txt", "one two three four five six seven eight");
  const std::vector<std::vector<std::string>> commands = {
      {"generate", "--checkpoint", "chat", "--prompt", "a", "--max-tokens", "1"},
      {"eval", "--checkpoint", "chat", "--data", "text.txt"},
      {"inspect", "--checkpoint", "chat", "--data", "text.txt"},
      {"convert", "--checkpoint", "chat", "--out", "out"},
      {"train", "--from", "chat", "--data", "text.txt", "--out", "run", "--steps", "1"}};
  for (const std::vector<std::string>& command : commands) expect_refused(command, fault);
  EXPECT_FALSE(fs::exists(folder_ / "out"));
  std::vector<std::string> on = commands[3];
  on.push_back("--allow-non-finite");
  EXPECT_EQ(run(on).code, 0);
  // Infinite weights give no logits to draw from.
  std::vector<std::string> draw = commands[0];
  draw.push_back("--allow-non-finite");
  const Result drawn = run(draw);  // which prints the prompt first
  EXPECT_EQ(drawn.code, 2);
  EXPECT_THAT(drawn.err, HasSubstr("no token can be drawn"));
}

TEST_F(HostileCheckpoint, TemplatesWithoutEnd) {
  const std::string open(5000, '('), close(5000, ')');
  chat_refused("{{ " + open + "1" + close + " }}", "nested too deeply");
  std::string deep;
  for (int i = 0; i < 5000; ++i) deep += "{% if true %}";
  chat_refused(deep, "nested too deeply");
  chat_refused("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nests calls");
  chat_refused("{% include 'chat_template.jinja' %}", "'include' is not supported");
  chat_refused("{% for i in range(10000000000) %}{% endfor %}", "range");
  chat_refused(
      "{% for i in range(90000) %}{% for j in range(90000) %}{{ j }}{% endfor %}{% endfor %}",
      "does not come to an end");
}

// Reading weights takes seconds. They are non-finite here, so reading them would change the error.
TEST_F(HostileCheckpoint, WhatIsQuickToCheckIsRefusedBeforeWeightsAreRead) {
  write("chat/model.safetensors", "none");
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{"inspect"}, {"eval"}, {"bench", "forward"}}) {
    std::vector<std::string> words = command;
    words.insert(words.end(), {"--checkpoint", "chat", "--data", "nowhere"});
    refused(words, "nowhere");
    fs::rename(folder_ / "chat" / "tokenizer.json", folder_ / "away");
    refused(words, "tokenizer.json");
    fs::rename(folder_ / "away", folder_ / "chat" / "tokenizer.json");
  }
}

}  // namespace
}  // namespace twell
