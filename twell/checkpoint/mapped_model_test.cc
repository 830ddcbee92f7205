// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/mapped_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>

#include "twell/base/error.h"
#include "twell/base/test_folder.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/safetensors.h"
#include "twell/model/forward.h"

namespace twell {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

ModelConfig mapped_config() {
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

class MappedModelTest : public ::testing::Test {
 protected:
  void save(const ModelConfig& config, DType dtype) {
    Model model(config);
    init_weights(ctx_, model, 7);
    save_model(model, folder_.path(), dtype);
  }
  // Every parameter has the values that load_model gives.
  void expect_values_of_load_model() {
    const std::unique_ptr<Model> want = load_model(ctx_, folder_.path());
    const std::shared_ptr<const ModelView> got = map_model(ctx_, folder_.path());
    ASSERT_EQ(got->config, want->config);
    ASSERT_EQ(got->parameters.size(), want->table.size());
    for (size_t i = 0; i < want->table.size(); ++i) {
      const ParamSpec& spec = want->table[i];
      std::vector<float> values(static_cast<size_t>(spec.size()));
      widen(got->parameters[i].data, got->parameters[i].dtype, spec.size(), values.data());
      EXPECT_EQ(std::memcmp(values.data(), want->flat.data() + spec.offset, values.size() * 4), 0)
          << spec.name;
    }
  }
  fs::path file() const { return folder_.path() / "model.safetensors"; }

  Context ctx_{2};
  const TempFolder folder_;
};

TEST_F(MappedModelTest, HasTheValuesOfTheFileInItsDtype) {
  ModelConfig config = mapped_config();
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    save(config, dtype);
    expect_values_of_load_model();
    const std::shared_ptr<const ModelView> model = map_model(ctx_, folder_.path());
    EXPECT_EQ(model->stored.embedding.dtype, dtype);
    EXPECT_EQ(model->stored.head.data, model->stored.embedding.data);
    EXPECT_EQ(model->stored.layers[1].ffn.w_down.dtype, dtype);
    EXPECT_EQ(model->stored.layers[1].ffn.w_down.rows, config.ffn);
  }
  config.tied_embeddings = false;
  config.gated = false;
  config.family = Family::kQwen2;
  config.qkv_bias = true;
  save(config, DType::kBF16);
  expect_values_of_load_model();
  config.family = Family::kQwen3;
  config.qkv_bias = false;
  config.qk_norm = true;
  save(config, DType::kBF16);
  expect_values_of_load_model();
  const std::shared_ptr<const ModelView> model = map_model(ctx_, folder_.path());
  EXPECT_NE(model->stored.head.data, model->stored.embedding.data);
}

// transformers writes tensors in the order of their names, so that q, k and v lie apart.
TEST_F(MappedModelTest, TensorsInAnyOrderGiveTheSameHiddenStates) {
  save(mapped_config(), DType::kBF16);
  const std::unique_ptr<Model> model = load_model(ctx_, folder_.path());
  std::vector<TensorToWrite> tensors;
  {
    const SafetensorsFile in(file());
    for (const auto& [name, info] : in.tensors()) {
      const std::vector<std::byte> bytes(info.bytes.begin(), info.bytes.end());
      tensors.push_back(
          {name, info.dtype, info.shape, [bytes](const auto& sink) { sink(std::span(bytes)); }});
    }
  }
  write_safetensors(file(), tensors, {});
  expect_values_of_load_model();
  const std::shared_ptr<const ModelView> mapped = map_model(ctx_, folder_.path());
  EXPECT_TRUE(mapped->stored.layers[0].w_qkv.empty());

  const auto hidden = [&](const ModelView& of, int64_t tokens) {
    std::vector<int32_t> ids(static_cast<size_t>(tokens));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * 7 % 20);
    std::vector<float> out(static_cast<size_t>(tokens * of.config.width));
    ForwardState state(of.config, FfnPolicy::kAuto);
    const ForwardSequence sequence{.tokens = tokens};
    forward(ctx_, of, state,
            {.ids = ids,
             .sequences = {&sequence, 1},
             .hidden = MatrixF(out.data(), tokens, of.config.width)});
    return out;
  };
  EXPECT_EQ(hidden(*mapped, 5), hidden(*model, 5));
  const std::vector<float> got = hidden(*mapped, 30), want = hidden(*model, 30);
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-5f) << i;
}

// Squares of the transposition and their edges.
TEST_F(MappedModelTest, TransposesDownProjOfAnyShape) {
  ModelConfig config = mapped_config();
  config.width = 96;
  config.head_dim = 24;
  config.ffn = 1000;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    save(config, dtype);
    expect_values_of_load_model();
  }
}

// A header of odd length leaves every tensor unaligned.
TEST_F(MappedModelTest, CopiesTensorsThatAreNotAligned) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    save(mapped_config(), dtype);
    std::ifstream in(file(), std::ios::binary);
    std::string bytes{std::istreambuf_iterator<char>(in), {}};
    in.close();
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof(length));
    bytes.insert(8 + length, 1, ' ');
    ++length;
    std::memcpy(bytes.data(), &length, sizeof(length));
    std::ofstream(file(), std::ios::binary) << bytes;
    expect_values_of_load_model();
  }
}

TEST_F(MappedModelTest, RefusesDamageAsLoadModelDoes) {
  save(mapped_config(), DType::kBF16);
  Model model(mapped_config());
  init_weights(ctx_, model, 7);
  model.flat[5] = std::numeric_limits<float>::quiet_NaN();
  save_model(model, folder_.path(), DType::kBF16);
  const auto refusal = [&] {
    try {
      map_model(ctx_, folder_.path());
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(refusal(), HasSubstr("tensor model.embed_tokens.weight has the value nan at [0, 5]"));
  EXPECT_NE(map_model(ctx_, folder_.path(), {.allow_non_finite = true}), nullptr);

  save(mapped_config(), DType::kBF16);
  std::fstream damage(file(), std::ios::in | std::ios::out | std::ios::binary);
  damage.seekg(-3, std::ios::end);
  const char byte = static_cast<char>(damage.get() ^ 1);
  damage.seekp(-3, std::ios::end);
  damage.put(byte);
  damage.close();
  EXPECT_THAT(refusal(), HasSubstr("does not match its hash"));
}

}  // namespace
}  // namespace twell
