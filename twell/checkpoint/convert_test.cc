// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/convert.h"
#include "twell/checkpoint/config_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/test_folder.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/safetensors.h"

namespace twell {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;

fs::path golden(const std::string& name) {
  return fs::path(TWELL_SOURCE_DIR) / "tests" / "golden" / name;
}

using Files = std::map<std::string, std::string>;

Files contents(const fs::path& folder) {
  Files out;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename() == "golden.safetensors") continue;  // not part of the checkpoint
    out.emplace(entry.path().filename().string(), read_file(entry.path()));
  }
  return out;
}

// Resets or reads this process's peak resident memory in bytes.
void reset_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }
int64_t status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key)) return std::stoll(line.substr(key.size() + 1)) * 1024;
  }
  return 0;
}

class ConvertTest : public ::testing::Test {
 protected:
  std::string refusal(const fs::path& in, const ConvertOptions& options) const {
    try {
      convert_checkpoint(in, folder_ / "refused", options);
    } catch (const InputError& error) {
      EXPECT_FALSE(fs::exists(folder_ / "refused"));
      return error.what();
    }
    return "";
  }

  Context ctx_{2};
  const TempFolder temp_;
  const fs::path folder_ = temp_.path();
};

const ConvertOptions kToSparse{.layout = CheckpointLayout::kSparse};
const ConvertOptions kToHuggingFace{.layout = CheckpointLayout::kHuggingFace};

TEST_F(ConvertTest, WhatDoesNotChangeIsCopiedByteForByte) {
  for (const char* name : {"families/llama3", "families/llama_linear", "families/mistral",
                           "families/qwen3", "families/llama_sparse", "tied_gqa"}) {
    const fs::path in = folder_ / "in", out = folder_ / "out";
    fs::copy(golden(name), in);
    fs::remove(in / "golden.safetensors");
    std::ofstream(in / "tokenizer_config.json") << "{\"chat_template\": \"\"}";
    const ConvertResult result = convert_checkpoint(in, out, {});
    EXPECT_EQ(contents(out), contents(in)) << name;
    EXPECT_EQ(result.files, std::ssize(contents(in)));
    EXPECT_THAT(result.notes, ::testing::IsEmpty());
    fs::remove_all(in);
    fs::remove_all(out);
  }
}

TEST_F(ConvertTest, ToTheSparseLayoutAndBackIsTheIdentity) {
  const Files before = contents(golden("tied_gqa"));
  convert_checkpoint(golden("tied_gqa"), folder_ / "sparse", kToSparse);
  const json config = json::parse(read_file(folder_ / "sparse" / "config.json"));
  EXPECT_EQ(config["model_type"], "llama_sparse_relu");
  EXPECT_EQ(config["architectures"], json::array({"SparseLlamaForCausalLM"}));
  EXPECT_EQ(config["sparsity_gated_mlp"], true);
  EXPECT_EQ(load_config(folder_ / "sparse"), load_config(golden("tied_gqa")));
  convert_checkpoint(folder_ / "sparse", folder_ / "back", kToHuggingFace);
  EXPECT_EQ(contents(folder_ / "back"), before);
}

TEST_F(ConvertTest, PublishedSparseModelsBecomePlainOnes) {
  for (const std::string name : {"llama_sparse", "qwen2_sparse"}) {
    const fs::path in = golden("families/" + name), out = folder_ / name;
    const ConvertResult result = convert_checkpoint(in, out, kToHuggingFace);
    const json config = json::parse(read_file(out / "config.json"));
    EXPECT_EQ(config["hidden_act"], "relu");
    EXPECT_FALSE(config.contains("sparsity_l1_coeff"));
    EXPECT_EQ(config["model_type"], name == "llama_sparse" ? "llama" : "qwen2");
    EXPECT_THAT(result.notes, ::testing::Contains(HasSubstr("last_activated")));
    const auto expected = load_model(ctx_, in), converted = load_model(ctx_, out);
    EXPECT_EQ(converted->config, expected->config);
    EXPECT_EQ(std::memcmp(converted->flat.data(), expected->flat.data(),
                          static_cast<size_t>(expected->flat.size()) * sizeof(float)),
              0);
  }
}

TEST_F(ConvertTest, ToF32AndBackIsTheIdentityOnTheTensors) {
  const fs::path in = golden("families/llama_linear");  // F16, in shards
  convert_checkpoint(in, folder_ / "f32", {.dtype = DType::kF32});
  const json index = json::parse(read_file(folder_ / "f32" / "model.safetensors.index.json"));
  int64_t size = 0;
  const std::unique_ptr<Model> model = load_model(ctx_, folder_ / "f32");
  EXPECT_EQ(index["metadata"]["total_size"], model->flat.size() * 4);
  convert_checkpoint(folder_ / "f32", folder_ / "back", {.dtype = DType::kF16});
  for (const fs::directory_entry& entry : fs::directory_iterator(in)) {
    const fs::path file = entry.path().filename();
    if (file.extension() != ".safetensors" || file == "golden.safetensors") continue;
    const SafetensorsFile before(entry.path()), after(folder_ / "back" / file);
    for (const auto& [name, info] : before.tensors()) {
      const TensorInfo& other = after.tensor(name);
      EXPECT_EQ(other.dtype, info.dtype);
      EXPECT_EQ(other.shape, info.shape);
      EXPECT_TRUE(
          std::equal(info.bytes.begin(), info.bytes.end(), other.bytes.begin(), other.bytes.end()));
      ++size;
    }
  }
  EXPECT_EQ(size, std::ssize(model->table));
  EXPECT_EQ(contents(folder_ / "back")["config.json"], contents(in)["config.json"]);
}

TEST_F(ConvertTest, TheIndexCountsTheBytesOfQuantisedTensorsAndTheirScales) {
  const fs::path out = folder_ / "bytes";
  convert_checkpoint(golden("families/llama_linear"), out, {.weights = ByteType::kInt8});
  int64_t size = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(out)) {
    if (entry.path().extension() != ".safetensors") continue;
    const SafetensorsFile file(entry.path());
    for (const auto& [name, info] : file.tensors()) size += std::ssize(info.bytes);
  }
  const json index = json::parse(read_file(out / "model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], size);
}

TEST_F(ConvertTest, WhatALayoutCannotExpressIsRefused) {
  EXPECT_THAT(refusal(golden("families/llama3"), kToSparse),
              HasSubstr("the sparse layout is for models with relu, this one has silu"));
  const fs::path in = folder_ / "in";
  fs::copy(golden("families/qwen3"), in);
  json config = json::parse(read_file(in / "config.json"));
  config["hidden_act"] = "relu";
  write_file_atomic(in / "config.json", config.dump());
  EXPECT_THAT(refusal(in, kToSparse), HasSubstr("qwen3 models have no published sparse layout"));
  EXPECT_THROW(convert_checkpoint(in, folder_, {}), InputError) << "the folder exists";
  EXPECT_THROW(parse_checkpoint_layout("onnx"), InputError);
}

TEST_F(ConvertTest, AFaultyFolderIsRefusedBeforeAnythingIsWritten) {
  const fs::path in = folder_ / "in";
  fs::copy(golden("families/llama_linear"), in);
  fs::remove(in / "model-00002-of-00002.safetensors");
  EXPECT_THAT(refusal(in, {}), HasSubstr("model-00002-of-00002.safetensors"));
}

// Three shards of 48 MiB, converted to F32: peak memory stays far below one shard.
TEST_F(ConvertTest, MemoryDoesNotGrowWithTheModel) {
  constexpr int64_t kWidth = 1024, kFfn = 8192, kShardBytes = 3 * kWidth * kFfn * 2;
  const fs::path in = folder_ / "in";
  fs::create_directories(in);
  ModelConfig model = preset_config("tiny");
  model.width = kWidth;
  model.ffn = kFfn;
  model.layers = 3;
  model.heads = model.kv_heads = 1;
  model.head_dim = 8;
  model.vocab_size = 8;
  write_file_atomic(in / "config.json", config_to_json(model).dump());
  const std::string block(1 << 20, '\x3c');
  std::map<std::string, std::vector<TensorToWrite>> shards;
  json map;
  for (const ParamSpec& spec : parameter_table(model)) {
    const size_t at = spec.name.find("layers.");
    const std::string file =
        fmt::format("{}.safetensors", at == std::string::npos ? '0' : spec.name[at + 7]);
    map[spec.name] = file;
    shards[file].push_back(
        {spec.name, "BF16", spec.stored_shape(),
         [&block, size = static_cast<size_t>(2 * spec.size())](
             const std::function<void(std::span<const std::byte>)>& sink) {
           for (size_t done = 0; done < size; done += block.size()) {
             sink(std::as_bytes(std::span(block)).first(std::min(block.size(), size - done)));
           }
         }});
  }
  for (const auto& [file, tensors] : shards) write_safetensors(in / file, tensors, {});
  write_file_atomic(in / "model.safetensors.index.json", json{{"weight_map", map}}.dump());

  for (const std::optional<DType> dtype : {std::optional<DType>(), std::optional(DType::kF32)}) {
    reset_peak();
    const int64_t before = status_bytes("VmRSS:");
    convert_checkpoint(in, folder_ / "out", {.dtype = dtype});
    EXPECT_LT(status_bytes("VmHWM:") - before, kShardBytes + kShardBytes / 5);
    fs::remove_all(folder_ / "out");
  }
}

}  // namespace
}  // namespace twell
