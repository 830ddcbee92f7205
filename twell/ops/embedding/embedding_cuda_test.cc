// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/embedding/embedding_cuda.h"

#include <gtest/gtest.h>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"

namespace twell {
namespace {

TEST(EmbeddingCudaTest, CopiesRows) {
  TWELL_SKIP_WITHOUT_GPU();
  const CudaStream stream;
  for (const auto& [tokens, width] : {std::pair<int64_t, int64_t>{1, 8}, {129, 264}, {3, 2048}}) {
    const int64_t vocab = 57;
    const auto table = random_bf16(vocab * width, 1);
    std::vector<int32_t> ids(static_cast<size_t>(tokens));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>((i * 31 + 56) % 57);
    const auto device_table = upload(table);
    const auto device_ids = upload(ids);
    const auto out = poisoned<__nv_bfloat16>(tokens * width);
    const float scale = tokens == 129 ? 4.0f : 1.0f;
    TWELL_CUDA_CHECK(launch_embedding({.tokens = tokens,
                                       .width = width,
                                       .ids = device_ids.data(),
                                       .table = device_table.data(),
                                       .out = out.data(),
                                       .scale = scale},
                                      stream.get()));
    stream.synchronize();
    const auto got = to_floats(download(out)), rows = to_floats(table);
    for (int64_t m = 0; m < tokens; ++m) {
      for (int64_t d = 0; d < width; ++d) {
        ASSERT_EQ(got[static_cast<size_t>(m * width + d)],
                  scale * rows[static_cast<size_t>(ids[static_cast<size_t>(m)] * width + d)]);
      }
    }
  }
}

TEST(EmbeddingCudaTest, TakesIdsThatASamplerDrew) {
  TWELL_SKIP_WITHOUT_GPU();
  const CudaStream stream;
  const int64_t vocab = 57, width = 264;
  const auto table = random_bf16(vocab * width, 1);
  const std::vector<int32_t> drawn = {56, -1, 7}, ids = {-3, 5, -1, -2}, want = {7, 5, 56, 0};
  const auto device_table = upload(table);
  const auto device_ids = upload(ids), device_drawn = upload(drawn);
  const auto out = poisoned<__nv_bfloat16>(std::ssize(ids) * width);
  TWELL_CUDA_CHECK(launch_embedding({std::ssize(ids), width, device_ids.data(), device_table.data(),
                                     out.data(), device_drawn.data()},
                                    stream.get()));
  stream.synchronize();
  const auto got = to_floats(download(out)), rows = to_floats(table);
  for (size_t m = 0; m < ids.size(); ++m) {
    for (size_t d = 0; d < static_cast<size_t>(width); ++d) {
      ASSERT_EQ(got[m * width + d], rows[static_cast<size_t>(want[m]) * width + d]) << m;
    }
  }
}

}  // namespace
}  // namespace twell
