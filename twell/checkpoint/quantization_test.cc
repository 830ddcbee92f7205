// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/quantization.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "twell/base/content_hash.h"
#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/test_folder.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/config_json.h"
#include "twell/checkpoint/convert.h"
#include "twell/checkpoint/mapped_model.h"
#include "twell/checkpoint/safetensors.h"
#include "twell/model/forward.h"

namespace twell {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

// As llm-compressor writes it.
json published() {
  return json::parse(R"({
    "quantization_config": {
      "config_groups": {
        "group_0": {
          "format": null,
          "input_activations": {
            "actorder": null, "block_structure": null, "dynamic": true, "group_size": null,
            "num_bits": 8, "observer": null, "observer_kwargs": {}, "strategy": "token",
            "symmetric": true, "type": "float"
          },
          "output_activations": null,
          "targets": ["Linear"],
          "weights": {
            "actorder": null, "block_structure": null, "dynamic": false, "group_size": null,
            "num_bits": 8, "observer": "minmax", "observer_kwargs": {}, "strategy": "channel",
            "symmetric": true, "type": "float"
          }
        }
      },
      "format": "float-quantized",
      "global_compression_ratio": null,
      "ignore": ["lm_head"],
      "kv_cache_scheme": null,
      "quant_method": "compressed-tensors",
      "quantization_status": "compressed",
      "sparsity_config": {},
      "transform_config": {},
      "version": "0.12.2"
    }
  })");
}

std::string refusal_of_config(const json& config) {
  try {
    parse_quantization(JsonFields(config, "config.json"));
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

TEST(QuantizationTest, ReadsWhatIsPublishedAndWhatIsWritten) {
  EXPECT_EQ(parse_quantization(JsonFields(published(), "config.json")),
            (ByteWeights{ByteType::kE4M3}));
  for (const ByteType type : {ByteType::kE4M3, ByteType::kInt8}) {
    for (const bool head : {false, true}) {
      const ByteWeights weights{type, head};
      const json written = {{"quantization_config", quantization_to_json(weights)}};
      EXPECT_EQ(parse_quantization(JsonFields(written, "config.json")), weights);
      const json& config = written["quantization_config"];
      EXPECT_EQ(config["ignore"], head ? json::array() : json({"lm_head"}));
      EXPECT_EQ(config["config_groups"]["group_0"]["targets"],
                head ? json({"Linear", "lm_head"}) : json({"Linear"}));
    }
  }
  EXPECT_EQ(parse_quantization(JsonFields(json::object(), "config.json")), std::nullopt);
}

TEST(QuantizationTest, TheHeadIsInBytesUnlessItIsIgnored) {
  const auto head = [](const json& targets, const json& ignore) {
    json config = published();
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = targets;
    config["quantization_config"]["ignore"] = ignore;
    return parse_quantization(JsonFields(config, "config.json"))->head;
  };
  EXPECT_FALSE(head({"Linear"}, {"re:.*lm_head"}));
  EXPECT_FALSE(head({"Linear"}, {"model.vision", "lm_head"}));
  EXPECT_TRUE(head({"Linear"}, json::array()));
  EXPECT_TRUE(head({"Linear"}, nullptr));
  EXPECT_TRUE(head({"Linear", "re:.*lm_head$"}, json::array()));
}

TEST(QuantizationTest, RefusesOtherSchemesByName) {
  const auto with = [](const char* pointer, const json& value) {
    json config = published();
    config["/quantization_config"_json_pointer / json::json_pointer(pointer)] = value;
    return refusal_of_config(config);
  };
  EXPECT_THAT(with("/quant_method", "gptq"), HasSubstr("quant_method \"gptq\""));
  EXPECT_THAT(with("/format", "pack-quantized"), HasSubstr("format \"pack-quantized\""));
  EXPECT_THAT(with("/kv_cache_scheme", {{"num_bits", 8}}), HasSubstr("kv_cache_scheme"));
  EXPECT_THAT(with("/sparsity_config", {{"format", "sparse-24-bitmask"}}),
              HasSubstr("sparse-24-bitmask"));
  const std::string group = "/config_groups/group_0";
  EXPECT_THAT(with((group + "/weights/num_bits").c_str(), 4), HasSubstr("num_bits 4"));
  EXPECT_THAT(with((group + "/weights/strategy").c_str(), "block"), HasSubstr("\"block\""));
  EXPECT_THAT(with((group + "/weights/type").c_str(), "int"), HasSubstr("type \"int\""));
  EXPECT_THAT(with((group + "/weights/symmetric").c_str(), false), HasSubstr("symmetric"));
  EXPECT_THAT(with((group + "/input_activations/dynamic").c_str(), false), HasSubstr("dynamic"));
  EXPECT_THAT(with((group + "/input_activations/strategy").c_str(), "tensor"),
              HasSubstr("\"tensor\""));
  EXPECT_THAT(with((group + "/input_activations").c_str(), nullptr),
              HasSubstr("input_activations"));
  EXPECT_THAT(with((group + "/targets").c_str(), {"re:.*q_proj"}), HasSubstr("q_proj"));
  EXPECT_THAT(with((group + "/targets").c_str(), {"Linear", "Embedding"}), HasSubstr("Embedding"));
  EXPECT_THAT(with((group + "/targets").c_str(), {"lm_head"}), HasSubstr("lm_head"));
  EXPECT_THAT(with("/ignore", "lm_head"), HasSubstr("ignore must be a list"));
  json two = published();
  two["quantization_config"]["config_groups"]["group_1"] =
      two["quantization_config"]["config_groups"]["group_0"];
  EXPECT_THAT(refusal_of_config(two), HasSubstr("2 config_groups"));
}

class QuantizedCheckpointTest : public ::testing::Test {
 protected:
  QuantizedCheckpointTest() {
    ModelConfig config = preset_config("tiny", true);
    config.vocab_size = 64;
    config.width = 32;
    config.ffn = 48;
    config.heads = config.kv_heads = 2;
    config.head_dim = 16;
    config.layers = 2;
    model_ = std::make_unique<Model>(config);
    init_weights(ctx_, *model_, 5);
    std::filesystem::create_directory(folder_.path() / "original");
    save_model(*model_, folder_.path() / "original", DType::kF32);
  }
  std::filesystem::path converted(ByteType type) {
    const std::filesystem::path out = folder_.path() / std::string(byte_option_name(type));
    convert_checkpoint(folder_.path() / "original", out, {.weights = type});
    return out;
  }
  // A model like model_, and its folder, "tied" or "untied".
  std::unique_ptr<Model> saved(bool tied) {
    ModelConfig config = model_->config;
    config.tied_embeddings = tied;
    auto model = std::make_unique<Model>(config);
    init_weights(ctx_, *model, 7);
    std::filesystem::create_directory(folder_of(tied));
    save_model(*model, folder_of(tied), DType::kF32);
    return model;
  }
  std::filesystem::path folder_of(bool tied) { return folder_.path() / (tied ? "tied" : "untied"); }
  // The specification: of the rows in bf16.
  static OwnedByteMatrix quantised(ByteType type, ConstMatrixF rows) {
    std::vector<float> rounded;
    for (int64_t r = 0; r < rows.rows; ++r) {
      for (int64_t c = 0; c < rows.cols; ++c) rounded.push_back(to_float(to_bf16(rows(r, c))));
    }
    return quantise_rows(type, {rounded.data(), rows.rows, rows.cols});
  }
  std::string refused(const std::filesystem::path& in) {
    try {
      load_model(ctx_, in);
    } catch (const InputError& error) {
      return error.what();
    }
    return "";
  }

  Context ctx_{2};
  TempFolder folder_;
  std::unique_ptr<Model> model_;
};

TEST_F(QuantizedCheckpointTest, HoldsTheQuantisedWeights) {
  for (const ByteType type : {ByteType::kE4M3, ByteType::kInt8}) {
    const std::filesystem::path in = converted(type);
    EXPECT_EQ(load_weight_bytes(in), ByteWeights{type});
    const std::unique_ptr<Model> read = load_model(ctx_, in);
    const auto mapped = map_model(ctx_, in);
    for (size_t i = 0; i < read->table.size(); ++i) {
      const ParamSpec& spec = read->table[i];
      const ConstMatrixF got(read->flat.data() + spec.offset, spec.rows, spec.cols);
      const ConstMatrixF original(model_->flat.data() + spec.offset, spec.rows, spec.cols);
      // The specification, on rows of outputs in bf16.
      const int64_t outputs = spec.transposed ? spec.cols : spec.rows;
      const int64_t inputs = spec.size() / outputs;
      std::vector<float> rounded(static_cast<size_t>(spec.size()));
      for (int64_t r = 0; r < outputs; ++r) {
        for (int64_t c = 0; c < inputs; ++c) {
          const float value = spec.transposed ? original(c, r) : original(r, c);
          rounded[static_cast<size_t>(r * inputs + c)] = to_float(to_bf16(value));
        }
      }
      const OwnedByteMatrix want = quantise_rows(type, {rounded.data(), outputs, inputs});
      for (int64_t r = 0; r < outputs; ++r) {
        for (int64_t c = 0; c < inputs; ++c) {
          const float value = spec.transposed ? got(c, r) : got(r, c);
          const float expected = is_projection(spec) ? want.view().at(r, c) : original(r, c);
          ASSERT_EQ(value, expected) << spec.name << " " << r << ", " << c;
        }
      }
      if (!spec.is_vector) {
        std::vector<float> view(static_cast<size_t>(spec.size()));
        const WeightMatrix& stored = mapped->parameters[i];
        widen(stored.data, stored.dtype, spec.size(), view.data());
        // int8 stays as it is, with its scales; e4m3 is widened.
        EXPECT_EQ(stored.dtype == DType::kI8, is_projection(spec) && type == ByteType::kInt8);
        for (int64_t at = 0; stored.scales != nullptr && at < spec.size(); ++at) {
          const int64_t output = spec.transposed ? at % spec.cols : at / spec.cols;
          view[static_cast<size_t>(at)] *= stored.scales[output];
        }
        EXPECT_EQ(view, std::vector<float>(got.data, got.data + spec.size())) << spec.name;
      }
    }
  }
}

TEST_F(QuantizedCheckpointTest, QuantisingAtLoadGivesTheBitsOfAConvertedFile) {
  const std::filesystem::path in = converted(ByteType::kInt8);
  const auto file = map_model(ctx_, in);
  const auto loaded = map_model(ctx_, folder_.path() / "original", {.weights = ByteType::kInt8});
  const std::vector<ParamSpec> table = parameter_table(file->config);
  for (size_t i = 0; i < table.size(); ++i) {
    const WeightMatrix &want = file->parameters[i], &got = loaded->parameters[i];
    ASSERT_EQ(got.dtype, want.dtype) << table[i].name;
    if (got.dtype != DType::kI8) continue;
    EXPECT_EQ(std::memcmp(got.data, want.data, static_cast<size_t>(table[i].size())), 0);
    const int64_t outputs = table[i].transposed ? table[i].cols : table[i].rows;
    EXPECT_EQ(std::vector<float>(got.scales, got.scales + outputs),
              std::vector<float>(want.scales, want.scales + outputs));
  }
  EXPECT_THROW(map_model(ctx_, folder_.path() / "original", {.weights = ByteType::kE4M3}),
               InputError);
  EXPECT_THROW(map_model(ctx_, converted(ByteType::kE4M3), {.weights = ByteType::kInt8}),
               InputError);
}

// The same model with its projections as floats of the same values is the oracle.
TEST_F(QuantizedCheckpointTest, RunsInt8OnTheCpuDenseAndSparse) {
  const std::filesystem::path in = converted(ByteType::kInt8);
  const std::unique_ptr<Model> wide = load_model(ctx_, in);
  const auto bytes = map_model(ctx_, in);
  for (const int64_t tokens : {1, 7, 40}) {
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < tokens; ++i) {
      ids.push_back(static_cast<int32_t>(i * 5 % wide->config.vocab_size));
    }
    const auto hidden = [&](const ModelView& model, FfnPolicy policy) {
      ForwardState state(model.config, policy);
      std::vector<float> out(static_cast<size_t>(tokens * model.config.width));
      forward(ctx_, model, state,
              {.ids = ids,
               .sequences = {{{tokens, 0}}},
               .hidden = MatrixF(out.data(), tokens, model.config.width)});
      return out;
    };
    const auto want = hidden(*wide, FfnPolicy::kDense);
    for (const FfnPolicy policy :
         {FfnPolicy::kDense, FfnPolicy::kRowFused, FfnPolicy::kTileUnion}) {
      const auto got = hidden(*bytes, policy);
      double error = 0.0, size = 0.0;
      for (size_t i = 0; i < want.size(); ++i) {
        error += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
        size += double{want[i]} * want[i];
      }
      // A scale times a sum in place of a sum of scaled products: roundings of 2^-24. Up to 16
      // tokens activations are rounded to 16 bits too, by 2^-16 of a row's largest value at most.
      EXPECT_LT(std::sqrt(error / size), tokens <= 16 ? 5e-5 : 1e-5)
          << tokens << " " << ffn_policy_name(policy);
    }
  }
}

// The embedding stays as it is; a tied model gets a head of its own.
TEST_F(QuantizedCheckpointTest, HoldsTheHeadInBytes) {
  for (const bool tied : {true, false}) {
    const std::unique_ptr<Model> model = saved(tied);
    const auto& original = model->weights;
    for (const ByteType type : {ByteType::kE4M3, ByteType::kInt8}) {
      const std::filesystem::path in =
          folder_of(tied).string() + "-" + std::string(byte_option_name(type));
      convert_checkpoint(folder_of(tied), in, {.weights = type, .head_in_bytes = true});
      EXPECT_EQ(load_weight_bytes(in), (ByteWeights{type, true}));
      const std::unique_ptr<Model> read = load_model(ctx_, in);
      EXPECT_FALSE(read->config.tied_embeddings);
      const OwnedByteMatrix want = quantised(type, original.head);
      for (int64_t r = 0; r < want.rows; ++r) {
        for (int64_t c = 0; c < want.cols; ++c) {
          ASSERT_EQ(read->weights.head(r, c), want.view().at(r, c)) << r << ", " << c;
          ASSERT_EQ(read->weights.embedding(r, c), original.embedding(r, c)) << r << ", " << c;
        }
      }
      const CheckpointTensors tensors(in);
      EXPECT_EQ(tensors.find("lm_head.weight")->dtype, byte_type_name(type));
      EXPECT_EQ(tensors.find("lm_head.weight_scale")->shape, (std::vector<int64_t>{64, 1}));
      EXPECT_EQ(tensors.find("model.embed_tokens.weight")->dtype, "F32");
      if (type != ByteType::kInt8) continue;
      // At load, from floats and from projections in int8: the same bits.
      convert_checkpoint(folder_of(tied), in.string() + "-body", {.weights = type});
      convert_checkpoint(in.string() + "-body", in.string() + "-later", {.head_in_bytes = true});
      const LoadOptions both{.weights = type, .head_in_bytes = true};
      const LoadOptions head{.head_in_bytes = true};
      for (const auto& loaded :
           {map_model(ctx_, in), map_model(ctx_, in, both), map_model(ctx_, folder_of(tied), both),
            map_model(ctx_, in.string() + "-body", head),
            map_model(ctx_, in.string() + "-later")}) {
        EXPECT_FALSE(loaded->config.tied_embeddings);
        const WeightMatrix& got = loaded->stored.head;
        ASSERT_EQ(got.dtype, DType::kI8);
        EXPECT_EQ(std::memcmp(got.data, want.values.data(), want.values.size()), 0);
        EXPECT_EQ(std::vector<float>(got.scales, got.scales + got.rows), want.scales);
        ASSERT_EQ(loaded->stored.embedding.dtype, DType::kF32);
        EXPECT_EQ(std::memcmp(loaded->stored.embedding.data, original.embedding.data,
                              static_cast<size_t>(want.rows * want.cols) * sizeof(float)),
                  0);
      }
    }
  }
}

// The scales multiply exact sums, so the error against the matrix that the bytes stand for is that
// of the sums, and up to 16 tokens half a step of the inputs' 16 bits for each weight; against the
// floats it is half a step of a weight for each input, and bf16's half ulp.
TEST_F(QuantizedCheckpointTest, ComputesLogitsWithAHeadInInt8) {
  const std::unique_ptr<Model> model = saved(/*tied=*/true);
  const auto loaded =
      map_model(ctx_, folder_of(true), {.weights = ByteType::kInt8, .head_in_bytes = true});
  const OwnedByteMatrix bytes = quantised(ByteType::kInt8, model->weights.head);
  const ConstMatrixF head = model->weights.head;
  const int64_t width = head.cols;
  for (const int64_t tokens : {1, 3, 16, 17, 129}) {
    std::vector<float> x(static_cast<size_t>(tokens * width));
    for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i) * 0.37f);
    std::vector<float> got(static_cast<size_t>(tokens * head.rows), NAN);
    logits(ctx_, *loaded, {x.data(), tokens, width}, {got.data(), tokens, head.rows});
    for (int64_t m = 0; m < tokens; ++m) {
      for (int64_t v = 0; v < head.rows; ++v) {
        double sum = 0, floats = 0, size = 0, inputs = 0, largest = 0, weights = 0;
        for (int64_t i = 0; i < width; ++i) {
          const double value = x[static_cast<size_t>(m * width + i)];
          sum += value * bytes.view().at(v, i);
          floats += value * double{head(v, i)};
          size += std::abs(value * bytes.view().at(v, i));
          inputs += std::abs(value);
          largest = std::max(largest, std::abs(value));
          weights += std::abs(bytes.view().at(v, i));
        }
        const float logit = got[static_cast<size_t>(m * head.rows + v)];
        double rounding = static_cast<double>(width + 2) * 0x1p-24 * size;
        if (tokens <= 16) rounding += 0.5 / 32767 * largest * weights;
        ASSERT_NEAR(logit, sum, rounding) << m << ", " << v;
        const double step = bytes.scales[static_cast<size_t>(v)];
        ASSERT_NEAR(logit, floats, rounding + inputs * (0.5 * step + 127 * step * 0x1p-9));
      }
    }
  }
}

TEST_F(QuantizedCheckpointTest, RefusesAHeadInBytesAlone) {
  saved(/*tied=*/true);
  EXPECT_THROW(map_model(ctx_, folder_of(true), {.head_in_bytes = true}), InputError);
  EXPECT_THROW(convert_checkpoint(folder_of(true), folder_.path() / "out", {.head_in_bytes = true}),
               InputError);
  EXPECT_FALSE(std::filesystem::exists(folder_.path() / "out"));
  convert_checkpoint(folder_of(true), folder_.path() / "fp8", {.weights = ByteType::kE4M3});
  EXPECT_THROW(map_model(ctx_, folder_.path() / "fp8", {.head_in_bytes = true}), InputError);
}

// The index names the new tensors, also where the file has tied embeddings under the head's name.
TEST_F(QuantizedCheckpointTest, GivesShardsAHead) {
  const std::unique_ptr<Model> model = saved(/*tied=*/true);
  for (const char* name : {"model.embed_tokens.weight", "lm_head.weight"}) {
    const std::filesystem::path in = folder_.path() / (std::string("shards-") + name);
    std::filesystem::create_directory(in);
    std::filesystem::copy_file(folder_of(true) / kConfigFile, in / kConfigFile);
    const SafetensorsFile file(folder_of(true) / kWeightsFile);
    std::vector<TensorToWrite> tensors;
    json map;
    for (const TensorInfo* info : file.file_order()) {
      const bool embedding = info->name == "model.embed_tokens.weight";
      tensors.push_back({embedding ? name : info->name, info->dtype, info->shape,
                         [info](const auto& sink) { sink(info->bytes); }});
      map[tensors.back().name] = "one.safetensors";
    }
    write_safetensors(in / "one.safetensors", tensors, {});
    write_file_atomic(in / kIndexFile,
                      json{{"metadata", {{"total_size", 1}}}, {"weight_map", map}}.dump());
    const std::filesystem::path out = in.string() + "-int8";
    convert_checkpoint(in, out, {.weights = ByteType::kInt8, .head_in_bytes = true});
    const std::unique_ptr<Model> read = load_model(ctx_, out);
    const OwnedByteMatrix want = quantised(ByteType::kInt8, model->weights.head);
    EXPECT_EQ(read->weights.head(5, 3), want.view().at(5, 3));
    EXPECT_EQ(read->weights.embedding(5, 3), model->weights.embedding(5, 3));
    const CheckpointTensors written(out);
    int64_t size = 0;
    for (const TensorInfo* info : written.all()) size += std::ssize(info->bytes);
    EXPECT_EQ(json::parse(read_file(out / kIndexFile))["metadata"]["total_size"], size);
  }
}

TEST_F(QuantizedCheckpointTest, NamesTheTensorsAsCompressedTensorsDoes) {
  const CheckpointTensors tensors(converted(ByteType::kE4M3));
  const TensorInfo* down = tensors.find("model.layers.1.mlp.down_proj.weight");
  ASSERT_NE(down, nullptr);
  EXPECT_EQ(down->dtype, "F8_E4M3");
  EXPECT_EQ(down->shape, (std::vector<int64_t>{32, 48}));
  const TensorInfo* scale = tensors.find("model.layers.1.mlp.down_proj.weight_scale");
  ASSERT_NE(scale, nullptr);
  EXPECT_EQ(scale->dtype, "F32");
  EXPECT_EQ(scale->shape, (std::vector<int64_t>{32, 1}));
  EXPECT_EQ(tensors.find("model.embed_tokens.weight")->dtype, "F32");
}

TEST_F(QuantizedCheckpointTest, ConvertsFurtherAndRefusesASecondType) {
  const std::filesystem::path in = converted(ByteType::kE4M3);
  convert_checkpoint(in, folder_.path() / "bf16", {.dtype = DType::kBF16});
  const CheckpointTensors tensors(folder_.path() / "bf16");
  EXPECT_EQ(tensors.find("model.embed_tokens.weight")->dtype, "BF16");
  EXPECT_EQ(tensors.find("model.layers.0.mlp.up_proj.weight")->dtype, "F8_E4M3");
  load_model(ctx_, folder_.path() / "bf16");
  EXPECT_THROW(convert_checkpoint(in, folder_.path() / "again", {.weights = ByteType::kInt8}),
               InputError);
}

TEST_F(QuantizedCheckpointTest, RefusesFilesThatDoNotMatchTheirConfiguration) {
  const std::filesystem::path in = converted(ByteType::kE4M3);
  // The configuration alone says that the weights are in 8 bits.
  std::filesystem::create_directory(folder_.path() / "mixed");
  std::filesystem::copy_file(in / kConfigFile, folder_.path() / "mixed" / kConfigFile);
  std::filesystem::copy_file(folder_.path() / "original" / kWeightsFile,
                             folder_.path() / "mixed" / kWeightsFile);
  EXPECT_THAT(refused(folder_.path() / "mixed"), HasSubstr("is F32, but"));
  // And the other way round.
  std::filesystem::create_directory(folder_.path() / "unsaid");
  std::filesystem::copy_file(folder_.path() / "original" / kConfigFile,
                             folder_.path() / "unsaid" / kConfigFile);
  std::filesystem::copy_file(in / kWeightsFile, folder_.path() / "unsaid" / kWeightsFile);
  EXPECT_THAT(refused(folder_.path() / "unsaid"), HasSubstr("F8_E4M3"));
}

// NaN has two forms in e4m3; a scale is a finite number that is not negative.
TEST_F(QuantizedCheckpointTest, RefusesDamagedBytesAndScalesByName) {
  const std::string weight = "model.layers.1.mlp.down_proj.weight", scale = weight + "_scale";
  const auto bits = [](float value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  const auto with = [&](ByteType type, const std::string& name, size_t at,
                        const std::string& bytes) {
    const std::filesystem::path in = converted(type), path = in / kWeightsFile;
    std::string file = read_file(path);
    {
      const SafetensorsFile parsed(path);
      at += static_cast<size_t>(parsed.tensor(name).bytes.data() - parsed.bytes().data());
    }
    file.replace(at, bytes.size(), bytes);
    // Without its hash, so that the values themselves are looked at.
    file[file.find(kContentHashKey)] = '_';
    write_file_atomic(path, file);
    const std::string reason = refused(in);
    std::filesystem::remove_all(in);
    return reason;
  };
  EXPECT_EQ(with(ByteType::kE4M3, weight, 5, "\x7e"), "");
  for (const char* nan : {"\x7f", "\xff"}) {
    EXPECT_THAT(with(ByteType::kE4M3, weight, 5, nan),
                HasSubstr("tensor " + weight + " has the value NaN at 5"));
  }
  EXPECT_EQ(with(ByteType::kInt8, weight, 5, "\xff"), "");
  for (const ByteType type : {ByteType::kE4M3, ByteType::kInt8}) {
    for (const float bad : {-1.0f, std::numeric_limits<float>::infinity(), std::nanf("")}) {
      EXPECT_THAT(with(type, scale, 4 * 7, bits(bad)),
                  HasSubstr("tensor " + scale + " has the value"));
    }
  }
}

TEST_F(QuantizedCheckpointTest, RefusesNanAndInfiniteWeightsBeforeItWrites) {
  model_->flat[model_->table[2].offset + 7] = std::numeric_limits<float>::infinity();
  std::filesystem::create_directory(folder_.path() / "damaged");
  save_model(*model_, folder_.path() / "damaged", DType::kF32);
  EXPECT_THROW(convert_checkpoint(folder_.path() / "damaged", folder_.path() / "out",
                                  {.weights = ByteType::kE4M3, .allow_non_finite = true}),
               InputError);
  EXPECT_FALSE(std::filesystem::exists(folder_.path() / "out"));
}

}  // namespace
}  // namespace twell
