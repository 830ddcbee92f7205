// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/load_model_cuda.h"

#include <gtest/gtest.h>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_folder.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/convert.h"
#include "twell/model/cuda_test_model.h"

namespace twell {
namespace {

// Every parameter arrives bit for bit, from both kinds of files, for every kind of matrix.
TEST(LoadModelCuda, EqualsUploadOfTheHostModel) {
  TWELL_GPU_TEST();
  Context cpu(2);
  for (const bool gated : {true, false}) {
    for (const bool tied : {true, false}) {
      ModelConfig config = preset_config("tiny", gated);
      config.vocab_size = 331;
      config.width = 64;
      config.ffn = 192;
      config.heads = config.kv_heads = 4;
      config.head_dim = 16;
      config.layers = 2;
      config.tied_embeddings = tied;
      const auto model = rounded_model(cpu, config);
      const std::string want = ModelCuda(ctx, *model).weights_hash(ctx);
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const TempFolder folder;
        save_model(*model, folder.path(), dtype);
        EXPECT_EQ(load_model_cuda(ctx, folder.path())->weights_hash(ctx), want)
            << "gated " << gated << ", tied " << tied << ", " << dtype_name(dtype);
      }
    }
  }
}

// Quantised at load, quantised on the device, and read from a converted file: the same bits.
TEST(LoadModelCuda, InBytesEqualsTheConvertedCheckpoint) {
  TWELL_HOPPER_TEST();
  Context cpu(2);
  for (const bool gated : {true, false}) {
    ModelConfig config = preset_config("tiny", gated);
    config.vocab_size = 331;
    config.width = 64;
    config.ffn = 192;
    config.heads = config.kv_heads = 4;
    config.head_dim = 16;
    config.layers = 2;
    const auto model = rounded_model(cpu, config);
    const ModelCuda wide(ctx, *model);
    const std::string want = ModelCuda::in_bytes(ctx, wide)->weights_hash(ctx);
    const TempFolder folder;
    std::filesystem::create_directory(folder.path() / "f32");
    save_model(*model, folder.path() / "f32", DType::kF32);
    convert_checkpoint(folder.path() / "f32", folder.path() / "fp8", {.weights = ByteType::kE4M3});
    convert_checkpoint(folder.path() / "f32", folder.path() / "int8", {.weights = ByteType::kInt8});
    EXPECT_EQ(load_model_cuda(ctx, folder.path() / "f32", 0, {.weights = ByteType::kE4M3})
                  ->weights_hash(ctx),
              want);
    const auto read = load_model_cuda(ctx, folder.path() / "fp8");
    EXPECT_TRUE(read->in_bytes());
    EXPECT_EQ(read->weights_hash(ctx), want);
    EXPECT_EQ(read->bytes(), ModelCuda::bytes_needed(config, CudaBytes::kProjections));
    // Of int8 weights the GPU takes the values in bf16.
    const auto widened = load_model_cuda(ctx, folder.path() / "int8");
    EXPECT_FALSE(widened->in_bytes());
    EXPECT_EQ(widened->weights_hash(ctx),
              ModelCuda(ctx, *load_model(cpu, folder.path() / "int8")).weights_hash(ctx));
    EXPECT_THROW(load_model_cuda(ctx, folder.path() / "f32", 0, {.weights = ByteType::kInt8}),
                 InputError);
  }
}

// A head in e4m3, of tied embeddings too: quantised at load, on the device, from a converted file.
TEST(LoadModelCuda, AHeadInBytesEqualsTheConvertedCheckpoint) {
  TWELL_HOPPER_TEST();
  Context cpu(2);
  for (const bool tied : {true, false}) {
    ModelConfig config = preset_config("tiny", true);
    config.vocab_size = 336;
    config.tied_embeddings = tied;
    const auto model = rounded_model(cpu, config);
    const ModelCuda wide(ctx, *model);
    constexpr CudaBytes kBoth = CudaBytes::kProjectionsAndHead;
    const std::string want = ModelCuda::in_bytes(ctx, wide, kBoth)->weights_hash(ctx);
    const TempFolder folder;
    std::filesystem::create_directory(folder.path() / "f32");
    save_model(*model, folder.path() / "f32", DType::kF32);
    convert_checkpoint(folder.path() / "f32", folder.path() / "fp8", {.weights = ByteType::kE4M3});
    convert_checkpoint(folder.path() / "f32", folder.path() / "both",
                       {.weights = ByteType::kE4M3, .head_in_bytes = true});
    const LoadOptions at_load{.weights = ByteType::kE4M3, .head_in_bytes = true};
    const auto loaded = load_model_cuda(ctx, folder.path() / "f32", 0, at_load);
    EXPECT_EQ(loaded->bytes(), ModelCuda::bytes_needed(config, kBoth));
    EXPECT_FALSE(loaded->head_bytes().empty());
    EXPECT_EQ(loaded->weights_hash(ctx), want);
    EXPECT_EQ(
        load_model_cuda(ctx, folder.path() / "fp8", 0, {.head_in_bytes = true})->weights_hash(ctx),
        want);
    EXPECT_EQ(load_model_cuda(ctx, folder.path() / "both")->weights_hash(ctx), want);
    EXPECT_TRUE(load_model_cuda(ctx, folder.path() / "fp8")->head_bytes().empty());
  }
}

// Needs no GPU: refused before anything runs.
TEST(LoadModelCuda, RefusesAHeadInInt8) {
  const TempFolder folder;
  std::filesystem::create_directory(folder.path() / "f32");
  save_model(Model(preset_config("tiny", true)), folder.path() / "f32", DType::kF32);
  convert_checkpoint(folder.path() / "f32", folder.path() / "int8",
                     {.weights = ByteType::kInt8, .head_in_bytes = true});
  try {
    loads_in_bytes(folder.path() / "int8", {});
    FAIL();
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("runs on the CPU alone"), std::string::npos);
  }
}

TEST(LoadModelCuda, RefusesAHeadInBytesWithoutProjections) {
  TWELL_HOPPER_TEST();
  const auto message = [](const std::filesystem::path& folder, const LoadOptions& options) {
    try {
      loads_in_bytes(folder, options);
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const TempFolder folder;
  ModelConfig config = preset_config("tiny", true);
  save_model(Model(config), folder.path(), DType::kF32);
  EXPECT_NE(message(folder.path(), {.head_in_bytes = true}).find("needs projections in fp8"),
            std::string::npos);
  config.vocab_size = 331;
  const TempFolder odd;
  save_model(Model(config), odd.path(), DType::kF32);
  EXPECT_NE(message(odd.path(), {.weights = ByteType::kE4M3, .head_in_bytes = true})
                .find("a multiple of 8, got 331"),
            std::string::npos);
}

}  // namespace
}  // namespace twell
