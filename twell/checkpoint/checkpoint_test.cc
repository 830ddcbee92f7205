// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/test_folder.h"
#include "twell/checkpoint/safetensors.h"

namespace twell {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;

ModelConfig small_config() {
  ModelConfig config = preset_config("tiny");
  config.vocab_size = 20;
  config.width = 24;
  config.ffn = 40;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 6;
  return config;
}

Model random_model(const ModelConfig& config, uint64_t seed) {
  Model model(config);
  Context ctx(1);
  init_weights(ctx, model, seed);
  return model;
}

TensorToWrite raw_tensor(const std::string& name, const std::string& dtype,
                         const std::vector<int64_t>& shape, const std::string& bytes) {
  return {name, dtype, shape, [bytes](const auto& sink) { sink(std::as_bytes(std::span(bytes))); }};
}

class CheckpointTest : public ::testing::Test {
 protected:
  fs::path weights() const { return folder_ / "model.safetensors"; }

  // The tensors of model.safetensors, to be modified and written again.
  std::map<std::string, TensorToWrite> read_tensors() const {
    const SafetensorsFile file(weights());
    std::map<std::string, TensorToWrite> out;
    for (const auto& [name, info] : file.tensors()) {
      out.emplace(
          name, raw_tensor(name, info.dtype, info.shape,
                           {reinterpret_cast<const char*>(info.bytes.data()), info.bytes.size()}));
    }
    return out;
  }
  static void write_tensors(const fs::path& path, const std::map<std::string, TensorToWrite>& all) {
    std::vector<TensorToWrite> list;
    for (const auto& [name, tensor] : all) list.push_back(tensor);
    write_safetensors(path, list, {});
  }

  // Overwrites a value of a tensor and removes the file's hash.
  void put(const std::string& name, size_t at, const std::string& bytes) const {
    std::map<std::string, TensorToWrite> all = read_tensors();
    const SafetensorsFile file(weights());
    const TensorInfo& info = file.tensor(name);
    std::string content(reinterpret_cast<const char*>(info.bytes.data()), info.bytes.size());
    content.replace(at, bytes.size(), bytes);
    all.insert_or_assign(name, raw_tensor(name, info.dtype, info.shape, content));
    write_tensors(weights(), all);
  }

  std::string refusal() {
    try {
      load_model(ctx_, folder_);
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("\n")));
      return error.what();
    }
    return "";
  }

  void overwrite(const fs::path& path, const std::string& text) const {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
  }

  void expect_equal(const Model& a, const Model& b) const {
    ASSERT_EQ(a.config, b.config);
    EXPECT_EQ(std::memcmp(a.flat.data(), b.flat.data(),
                          static_cast<size_t>(a.flat.size()) * sizeof(float)),
              0);
  }

  Context ctx_{2};
  const TempFolder temp_;
  const fs::path folder_ = temp_.path();
};

// Covers every dtype and position, in tensors that are stored as in memory and transposed.
TEST_F(CheckpointTest, NamesTheFirstWeightThatIsNotFinite) {
  const Model model = random_model(small_config(), 7);
  const std::string up = "model.layers.1.mlp.up_proj.weight";      // [40, 24]
  const std::string down = "model.layers.0.mlp.down_proj.weight";  // [24, 40]
  const auto bits = [](auto value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  struct Case {
    DType dtype;
    std::string infinite, nan;
  };
  for (const Case& c : {Case{DType::kF32, bits(uint32_t{0xff800000u}), bits(uint32_t{0x7f800001u})},
                        Case{DType::kBF16, bits(uint16_t{0xff80}), bits(uint16_t{0x7fc0})},
                        Case{DType::kF16, bits(uint16_t{0xfc00}), bits(uint16_t{0x7e01})}}) {
    save_model(model, folder_, c.dtype);
    EXPECT_EQ(refusal(), "");
    const size_t size = c.nan.size();
    put(up, size * 959, c.nan);
    EXPECT_THAT(refusal(), HasSubstr("tensor " + up + " has the value nan at [39, 23]"));
    save_model(model, folder_, c.dtype);
    put(down, size * 40, c.infinite);
    EXPECT_THAT(refusal(), HasSubstr("tensor " + down + " has the value -inf at [1, 0]"));
    const auto loaded = load_model(ctx_, folder_, {.allow_non_finite = true});
    EXPECT_TRUE(std::isinf(loaded->weights.layers[0].ffn.w_down(0, 1)));
    put(up, size * 959, c.nan);  // of two the first, whichever thread is faster
    for (int repeat = 0; repeat < 10; ++repeat) EXPECT_THAT(refusal(), HasSubstr("tensor " + down));
  }
}

TEST_F(CheckpointTest, Float32RoundTripsBitForBit) {
  for (const bool gated : {true, false}) {
    for (const bool tied : {true, false}) {
      ModelConfig config = small_config();
      config.gated = gated;
      config.tied_embeddings = tied;
      config.eos_token = 3;
      const Model model = random_model(config, 1);
      save_model(model, folder_, DType::kF32);
      expect_equal(*load_model(ctx_, folder_), model);
    }
  }
}

TEST_F(CheckpointTest, BFloat16RoundTripsToTheRoundedWeights) {
  Model model = random_model(small_config(), 1);
  save_model(model, folder_, DType::kBF16);
  for (float& value : model.flat.span()) value = to_float(to_bf16(value));
  expect_equal(*load_model(ctx_, folder_), model);
}

TEST_F(CheckpointTest, Float16RoundTripsToTheRoundedWeightsAndRefusesWhatIsTooLarge) {
  Model model = random_model(small_config(), 1);
  save_model(model, folder_, DType::kF16);
  for (float& value : model.flat.span()) value = f16_to_float(float_to_f16(value));
  expect_equal(*load_model(ctx_, folder_), model);
  EXPECT_EQ(json::parse(read_file(folder_ / "config.json"))["torch_dtype"], "float16");
  model.flat[3] = 70000.0f;
  EXPECT_THROW(save_model(model, folder_, DType::kF16), InputError);
}

TEST_F(CheckpointTest, DownProjectionIsStoredTheHuggingFaceWay) {
  const Model model = random_model(small_config(), 1);
  save_model(model, folder_, DType::kF32);
  const SafetensorsFile file(weights());
  const TensorInfo& down = file.tensor("model.layers.1.mlp.down_proj.weight");
  ASSERT_EQ(down.shape, (std::vector<int64_t>{24, 40}));
  const ConstMatrixF w_down = model.weights.layers[1].ffn.w_down;  // [F, D]
  for (int64_t d = 0; d < 24; ++d) {
    for (int64_t f = 0; f < 40; ++f) {
      float value;
      std::memcpy(&value, down.bytes.data() + (d * 40 + f) * 4, 4);
      ASSERT_EQ(value, w_down(f, d));
    }
  }
}

TEST_F(CheckpointTest, ReadsFloat16AtAnyAlignment) {
  Model model = random_model(small_config(), 1);
  save_model(model, folder_, DType::kF32);
  auto tensors = read_tensors();
  for (const ParamSpec& spec : model.table) {
    if (spec.transposed) continue;
    std::string half;
    for (int64_t i = 0; i < spec.size(); ++i) {
      float& value = model.flat[spec.offset + i];
      const uint16_t bits = float_to_f16(value);
      half.append(reinterpret_cast<const char*>(&bits), 2);
      value = f16_to_float(bits);
    }
    const auto& shape = tensors.at(spec.name).shape;
    tensors.at(spec.name) = raw_tensor(spec.name, "F16", shape, half);
  }
  // One odd byte before all other tensors, under a name that may be extra, makes them unaligned.
  tensors.emplace("a.rotary_emb.inv_freq", raw_tensor("a.rotary_emb.inv_freq", "U8", {1}, "x"));
  write_tensors(weights(), tensors);
  expect_equal(*load_model(ctx_, folder_), model);
}

TEST_F(CheckpointTest, TruncatedFileIsRefused) {
  save_model(random_model(small_config(), 1), folder_, DType::kF32);
  const std::string good = read_file(weights());
  for (const size_t size : {size_t{0}, size_t{4}, size_t{100}, good.size() / 2, good.size() - 1}) {
    overwrite(weights(), good.substr(0, size));
    EXPECT_THAT(refusal(), HasSubstr("model.safetensors: ")) << size;
  }
}

TEST_F(CheckpointTest, FlippedByteIsRefused) {
  save_model(random_model(small_config(), 1), folder_, DType::kBF16);
  std::string bad = read_file(weights());
  bad[bad.size() - 77] = static_cast<char>(bad[bad.size() - 77] ^ 1);
  overwrite(weights(), bad);
  EXPECT_THAT(refusal(), HasSubstr("the content does not match its hash"));
}

TEST_F(CheckpointTest, ConfigThatContradictsTheWeightsIsRefused) {
  save_model(random_model(small_config(), 1), folder_, DType::kF32);
  const json good = json::parse(read_file(folder_ / "config.json"));
  const auto with = [&](const char* key, const json& value) {
    json config = good;
    config[key] = value;
    overwrite(folder_ / "config.json", config.dump());
    return refusal();
  };
  EXPECT_THAT(with("vocab_size", 21),
              HasSubstr("model.embed_tokens.weight has shape [20, 24], but config.json asks for "
                        "[21, 24]"));
  EXPECT_THAT(with("num_hidden_layers", 3),
              HasSubstr("model.layers.2.input_layernorm.weight [24] is missing"));
  EXPECT_THAT(with("num_hidden_layers", 1), HasSubstr("model.layers.1."));
  EXPECT_THAT(with("num_hidden_layers", 1), HasSubstr("has no place in the model"));
  EXPECT_THAT(with("num_key_value_heads", 4), HasSubstr("k_proj.weight has shape [12, 24]"));
  EXPECT_THAT(with("mlp_gated", false), HasSubstr("mlp.gate_proj.weight [40, 24] has no place"));
  EXPECT_THAT(with("tie_word_embeddings", false), HasSubstr("lm_head.weight [20, 24] is missing"));
  EXPECT_THAT(with("vocab_size", 1 << 24), HasSubstr("[16777216, 24]"));
}

TEST_F(CheckpointTest, MissingGateSaysHowToReadAModelWithoutOne) {
  ModelConfig config = small_config();
  config.gated = false;
  save_model(random_model(config, 1), folder_, DType::kF32);
  json json_config = json::parse(read_file(folder_ / "config.json"));
  json_config.erase("mlp_gated");
  overwrite(folder_ / "config.json", json_config.dump());
  EXPECT_THAT(refusal(), HasSubstr("\"mlp_gated\": false"));
}

TEST_F(CheckpointTest, TiedHeadMayBeStoredWhenItIsEqual) {
  const Model model = random_model(small_config(), 1);
  save_model(model, folder_, DType::kF32);
  auto tensors = read_tensors();
  TensorToWrite head = tensors.at("model.embed_tokens.weight");
  head.name = "lm_head.weight";
  tensors.emplace(head.name, head);
  write_tensors(weights(), tensors);
  expect_equal(*load_model(ctx_, folder_), model);

  tensors.at(head.name) =
      raw_tensor(head.name, "F32", {20, 24}, std::string(size_t{20 * 24 * 4}, '\0'));
  write_tensors(weights(), tensors);
  EXPECT_THAT(refusal(), HasSubstr("lm_head.weight differs from model.embed_tokens.weight"));
}

// Also in another dtype, and where it takes more than one piece of values.
TEST_F(CheckpointTest, TiedHeadsOfTwoDtypesAreCompared) {
  ModelConfig config = small_config();
  config.vocab_size = 1500;  // 36,000 values
  Model model = random_model(config, 1);
  for (float& value : model.flat.span()) value = to_float(to_bf16(value));
  save_model(model, folder_, DType::kF32);
  auto tensors = read_tensors();
  std::string half;
  for (int64_t i = 0; i < 1500 * 24; ++i) {
    const uint16_t bits = to_bf16(model.flat[i]).bits;
    half.append(reinterpret_cast<const char*>(&bits), 2);
  }
  const auto refused = [&] {
    tensors.insert_or_assign("lm_head.weight",
                             raw_tensor("lm_head.weight", "BF16", {1500, 24}, half));
    write_tensors(weights(), tensors);
    return refusal();
  };
  EXPECT_EQ(refused(), "");
  half[2 * 35'000] = static_cast<char>(half[2 * 35'000] ^ 1);
  EXPECT_THAT(refused(), HasSubstr("lm_head.weight differs from model.embed_tokens.weight"));
}

TEST_F(CheckpointTest, OfTiedTensorsTheHeadAloneMayBeStored) {
  const Model model = random_model(small_config(), 1);
  save_model(model, folder_, DType::kF32);
  auto tensors = read_tensors();
  TensorToWrite head = tensors.at("model.embed_tokens.weight");
  head.name = "lm_head.weight";
  tensors.erase("model.embed_tokens.weight");
  tensors.emplace(head.name, head);
  write_tensors(weights(), tensors);
  expect_equal(*load_model(ctx_, folder_), model);
  const OpenCheckpoint opened = open_checkpoint(folder_);
  EXPECT_EQ(opened.tensors.all().size(), tensors.size());
  EXPECT_FALSE(opened.is_extra(*opened.tensors.find("lm_head.weight")));
  put("lm_head.weight", 0, std::string("\x00\x00\xC0\x7F", 4));
  EXPECT_THAT(refusal(), HasSubstr("lm_head.weight"));
  tensors.erase(head.name);
  write_tensors(weights(), tensors);
  EXPECT_THAT(refusal(), HasSubstr("model.embed_tokens.weight [20, 24] is missing"));
}

TEST_F(CheckpointTest, WrongDtypesAndMissingFilesAreRefused) {
  save_model(random_model(small_config(), 1), folder_, DType::kF32);
  auto tensors = read_tensors();
  tensors.at("model.norm.weight") =
      raw_tensor("model.norm.weight", "F64", {24}, std::string(24 * 8, '\0'));
  write_tensors(weights(), tensors);
  EXPECT_THAT(refusal(), HasSubstr("model.norm.weight is F64; weights must be F32, BF16 or F16"));
  fs::remove(weights());
  EXPECT_THAT(refusal(), HasSubstr("neither model.safetensors nor model.safetensors.index.json"));
  fs::remove(folder_ / "config.json");
  EXPECT_THAT(refusal(), HasSubstr("config.json"));
  EXPECT_THROW(load_model(ctx_, folder_ / "nowhere"), InputError);
}

TEST_F(CheckpointTest, NotANumberIsKeptWhereAllowed) {
  Model model = random_model(small_config(), 1);
  model.flat[5] = NAN;
  save_model(model, folder_, DType::kF32);
  EXPECT_TRUE(std::isnan(load_model(ctx_, folder_, {.allow_non_finite = true})->flat[5]));
}

class ShardedCheckpointTest : public CheckpointTest {
 protected:
  void SetUp() override {
    save_model(model_, folder_, DType::kF32);
    std::map<std::string, TensorToWrite> shards[2];
    size_t i = 0;
    for (const auto& [name, tensor] : read_tensors()) {
      const size_t shard = i++ % 2;
      shards[shard].emplace(name, tensor);
      map_[name] = shard == 0 ? "a.safetensors" : "b.safetensors";
    }
    write_tensors(folder_ / "a.safetensors", shards[0]);
    write_tensors(folder_ / "b.safetensors", shards[1]);
    fs::remove(weights());
  }
  void write_index() const {
    overwrite(folder_ / "model.safetensors.index.json",
              json{{"metadata", {{"total_size", 1}}}, {"weight_map", map_}}.dump());
  }

  Model model_ = random_model(small_config(), 1);
  json map_;
};

TEST_F(ShardedCheckpointTest, IsReadThroughItsIndex) {
  write_index();
  expect_equal(*load_model(ctx_, folder_), model_);
}

TEST_F(ShardedCheckpointTest, PathsOutOfTheFolderAreRefused) {
  for (const char* file : {"../a.safetensors", "/etc/a.safetensors", "x/../a.safetensors", "..", "",
                           ".safetensors", "a\\b.safetensors", "a.bin"}) {
    map_["model.norm.weight"] = file;
    write_index();
    EXPECT_THAT(refusal(), HasSubstr("not the name of a .safetensors file")) << file;
  }
  map_["model.norm.weight"] = 3;
  write_index();
  EXPECT_THAT(refusal(), HasSubstr("model.norm.weight is mapped to 3"));
}

TEST_F(ShardedCheckpointTest, AnIndexThatDisagreesIsRefused) {
  const json good = map_;
  map_["model.norm.weight"] =
      good["model.norm.weight"] == "a.safetensors" ? "b.safetensors" : "a.safetensors";
  write_index();
  EXPECT_THAT(refusal(), HasSubstr("tensor model.norm.weight is missing"));
  map_ = good;
  map_.erase("model.norm.weight");
  write_index();
  EXPECT_THAT(refusal(), HasSubstr("model.norm.weight"));
  map_ = good;
  map_["model.norm.weight"] = "c.safetensors";
  write_index();
  EXPECT_THAT(refusal(), HasSubstr("c.safetensors"));
  overwrite(folder_ / "model.safetensors.index.json", "{\"weight_map\": 3}");
  EXPECT_THAT(refusal(), HasSubstr("weight_map is missing"));
}

// A file size limit simulates a full disk: writes fail half-way.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit = {bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST_F(CheckpointTest, FullDiskLeavesTheOldOneWhole) {
  const fs::path target = folder_ / "checkpoint";
  const Model old = random_model(small_config(), 1);
  const auto save = [&](const Model& model) {
    write_folder_atomic(target, [&](const fs::path& f) { save_model(model, f, DType::kF32); });
  };
  save(old);
  {
    const FileSizeLimit limit(8192);
    EXPECT_THROW(save(random_model(small_config(), 2)), InputError);
  }
  expect_equal(*load_model(ctx_, target), old);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
}

}  // namespace
}  // namespace twell
