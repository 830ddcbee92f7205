// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/load_model_cuda.h"

#include <gtest/gtest.h>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_folder.h"
#include "twell/checkpoint/checkpoint.h"
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

}  // namespace
}  // namespace twell
