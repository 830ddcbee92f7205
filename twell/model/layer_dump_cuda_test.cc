// SPDX-License-Identifier: Apache-2.0
// The stages of a layer on the GPU against those on the CPU, on the same bf16 weights.
#include "twell/model/layer_dump_cuda.h"

#include <gtest/gtest.h>

#include "twell/base/cuda_gtest.h"
#include "twell/model/cuda_test_model.h"

namespace twell {
namespace {

TEST(LayerDumpCuda, HasTheStagesOfTheCpu) {
  TWELL_GPU_TEST();
  for (const bool gated : {true, false}) {
    for (const int64_t ffn : {192, 188}) {  // the second is padded on the device
      ModelConfig config;
      config.vocab_size = 331;
      config.width = 64;
      config.ffn = ffn;
      config.layers = 3;
      config.heads = 4;
      config.kv_heads = 2;
      config.head_dim = 16;
      config.context = 300;
      config.gated = gated;
      config.init_std = 0.1;
      Context cpu(2);
      const std::unique_ptr<Model> model = rounded_model(cpu, config);
      const ModelCuda on_gpu(ctx, *model);
      const std::vector<int32_t> ids = random_ids(100, config.vocab_size, 1);
      for (const FfnPolicy policy : {FfnPolicy::kDense, FfnPolicy::kSparse}) {
        for (const int64_t layer : {0, 2}) {
          const LayerDump expected = dump_layer(cpu, *model, ids, layer, policy);
          const LayerDump actual = dump_layer_cuda(ctx, on_gpu, ids, layer, policy);
          ASSERT_EQ(actual.stages.size(), expected.stages.size());
          for (size_t i = 0; i < actual.stages.size(); ++i) {
            const DumpedStage& a = actual.stages[i];
            const DumpedStage& b = expected.stages[i];
            EXPECT_EQ(a.name, b.name);
            ASSERT_EQ(a.cols, b.cols) << a.name;
            // Each of some ten products and sums in front rounds to bf16, by 2^-9 on average. A
            // stage of another layer or token differs by about 1.
            EXPECT_LT(relative_difference(a.values, b.values), 0.04)
                << a.name << " of layer " << layer << ", gated " << gated;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace twell
