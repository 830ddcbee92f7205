// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/embedding/embedding_cuda.h"

#include <gtest/gtest.h>

#include <cmath>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"
#include "twell/ops/embedding/embedding.h"

namespace twell {
namespace {

struct BackwardCase {
  int64_t tokens, width, vocab;
  int64_t common;  // every common-th id is random, the others are 3; 0: all are random
};

class EmbeddingBackwardCudaTest : public testing::TestWithParam<BackwardCase> {};

TEST_P(EmbeddingBackwardCudaTest, EqualsCpu) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [tokens, width, vocab, common] = GetParam();
  const float scale = common > 0 ? 0.75f : 1.0f;
  const CudaStream stream;
  CudaContext ctx(stream.get());
  std::vector<int32_t> ids(static_cast<size_t>(tokens));
  for (size_t i = 0; i < ids.size(); ++i) {
    const bool frequent = common > 0 && i % static_cast<size_t>(common) != 0;
    const uint64_t drawn = uniform_below(7, 1, i, static_cast<uint64_t>(vocab));
    ids[i] = frequent ? 3 : static_cast<int32_t>(drawn);
  }
  const auto d_out = random_bf16(tokens * width, 2);
  const std::vector<float> before = to_floats(random_bf16(vocab * width, 3));
  const auto device_ids = upload(ids);
  const auto device_d_out = upload(d_out);
  // Larger than needed, as for the last micro-batch of a step.
  const EmbeddingWorkspaceCuda workspace(tokens + 5, width);
  const auto on_device = [&, m = tokens, d = width, v = vocab](bool graph) {
    const auto d_table = upload(before);
    const auto once = [&] {
      embedding_backward_cuda(
          ctx, {m, d, v, device_ids.data(), device_d_out.data(), d_table.data(), scale}, workspace);
    };
    if (graph) {
      replay_as_graph(stream, 1, once);
    } else {
      once();
    }
    stream.synchronize();
    return download(d_table);
  };
  const auto got = on_device(false);
  EXPECT_EQ(got, on_device(true));

  Context cpu(1);
  const std::vector<float> d_out_f = to_floats(d_out);
  std::vector<float> want = before;
  embedding_backward(cpu, ids, ConstMatrixF(d_out_f.data(), tokens, width),
                     MatrixF(want.data(), vocab, width), scale);
  // f32 sums of normal values, added in a different order.
  const float near = 1e-5f + 2e-7f * static_cast<float>(tokens);
  for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], near) << i;
}

INSTANTIATE_TEST_SUITE_P(Shapes, EmbeddingBackwardCudaTest,
                         testing::Values(BackwardCase{1, 8, 5, 0}, BackwardCase{32, 64, 4, 0},
                                         BackwardCase{33, 64, 9, 40}, BackwardCase{64, 16, 9, 70},
                                         BackwardCase{127, 264, 9, 3},
                                         BackwardCase{129, 2056, 500, 0},
                                         BackwardCase{2000, 320, 1000, 9},
                                         BackwardCase{3000, 64, 65537, 0}));

TEST(EmbeddingBackwardCudaTest, RefusesWorkspace) {
  TWELL_GPU_TEST();
  const EmbeddingWorkspaceCuda workspace(8, 16);
  EXPECT_THROW(embedding_backward_cuda(ctx, {.tokens = 9, .width = 16, .vocab = 4}, workspace),
               Error);
  EXPECT_THROW(embedding_backward_cuda(ctx, {.tokens = 8, .width = 24, .vocab = 4}, workspace),
               Error);
}

}  // namespace
}  // namespace twell
