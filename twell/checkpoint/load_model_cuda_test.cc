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
    EXPECT_EQ(read->bytes(), ModelCuda::bytes_needed(config, true));
    // Of int8 weights the GPU takes the values in bf16.
    const auto widened = load_model_cuda(ctx, folder.path() / "int8");
    EXPECT_FALSE(widened->in_bytes());
    EXPECT_EQ(widened->weights_hash(ctx),
              ModelCuda(ctx, *load_model(cpu, folder.path() / "int8")).weights_hash(ctx));
    EXPECT_THROW(load_model_cuda(ctx, folder.path() / "f32", 0, {.weights = ByteType::kInt8}),
                 InputError);
  }
}

// Needs no GPU: a head in 8 bits is refused before anything runs.
TEST(LoadModelCuda, RefusesAHeadInBytes) {
  Context cpu(2);
  const TempFolder folder;
  std::filesystem::create_directory(folder.path() / "f32");
  const Model model(preset_config("tiny", true));
  save_model(model, folder.path() / "f32", DType::kF32);
  convert_checkpoint(folder.path() / "f32", folder.path() / "fp8",
                     {.weights = ByteType::kE4M3, .head_in_bytes = true});
  for (const auto& [name, options] :
       {std::pair("f32", LoadOptions{.weights = ByteType::kE4M3, .head_in_bytes = true}),
        std::pair("fp8", LoadOptions{})}) {
    try {
      loads_in_bytes(folder.path() / name, options);
      FAIL() << name;
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find("runs on the CPU alone"), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace twell
