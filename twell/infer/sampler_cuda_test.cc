// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/sampler_cuda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "twell/base/cuda_gtest.h"
#include "twell/base/rng.h"
#include "twell/infer/sampler.h"

namespace twell {
namespace {

std::vector<int32_t> on_device(const std::vector<float>& logits, int64_t rows, int64_t vocab,
                               const SamplerOptions& options, uint64_t index) {
  const CudaStream stream;
  const auto device_logits = upload(logits);
  std::vector<float> uniforms;
  for (int64_t row = 0; row < rows; ++row) {
    uniforms.push_back(uniform(options.seed, static_cast<uint64_t>(row), index));
  }
  const auto device_uniforms = upload(uniforms);
  const auto ids = poisoned<int32_t>(rows);
  TWELL_CUDA_CHECK(launch_sample({.rows = rows,
                                  .vocab = vocab,
                                  .stride = static_cast<int64_t>(logits.size()) / rows,
                                  .logits = device_logits.data(),
                                  .uniforms = device_uniforms.data(),
                                  .ids = ids.data(),
                                  .temperature = options.temperature,
                                  .top_k = options.top_k,
                                  .top_p = options.top_p,
                                  .min_p = options.min_p},
                                 stream.get()));
  stream.synchronize();
  return download(ids);
}

class SamplerCudaTest : public testing::TestWithParam<SamplerOptions> {};

TEST_P(SamplerCudaTest, DrawsWhatTheCpuDraws) {
  TWELL_SKIP_WITHOUT_GPU();
  SamplerOptions options = GetParam();
  options.seed = 7;
  const int64_t rows = 5, stride = 5003, vocab = 5000;
  std::vector<float> logits(static_cast<size_t>(rows * stride));
  for (size_t i = 0; i < logits.size(); ++i) {
    // Coarse values give many ties, also at the top. The last logits of a row are not used.
    logits[i] = std::round(8.0f * normal(3, 1, i)) / 4.0f;
    if (static_cast<int64_t>(i) % stride >= vocab) logits[i] = 1000.0f;
  }
  logits[17] = -std::numeric_limits<float>::infinity();
  for (uint64_t index = 0; index < 40; ++index) {
    const auto got = on_device(logits, rows, vocab, options, index);
    for (int64_t row = 0; row < rows; ++row) {
      const std::span<const float> of_row(logits.data() + row * stride, static_cast<size_t>(vocab));
      ASSERT_EQ(got[static_cast<size_t>(row)],
                sample(of_row, options, static_cast<uint64_t>(row), index))
          << "row " << row << ", index " << index;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Options, SamplerCudaTest,
    testing::Values(SamplerOptions{.temperature = 0.0f}, SamplerOptions{},
                    SamplerOptions{.temperature = 0.7f, .top_k = 40}, SamplerOptions{.top_k = 1},
                    SamplerOptions{.top_k = 100000},
                    SamplerOptions{.temperature = 1.3f, .top_p = 0.9f},
                    SamplerOptions{.top_p = 0.001f},
                    SamplerOptions{.temperature = 0.8f, .top_k = 300, .top_p = 0.95f},
                    SamplerOptions{.min_p = 0.2f},
                    SamplerOptions{.top_k = 50, .top_p = 0.5f, .min_p = 0.01f}));

TEST(SamplerCudaTest, MarksRowsThatCannotBeSampled) {
  TWELL_SKIP_WITHOUT_GPU();
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> logits = {0.0f,      std::nanf(""), 1.0f,                             //
                                     -infinity, -infinity,     -infinity, 1.0f, infinity, 0.0f,  //
                                     -1.0f,     -3.0f,         -infinity};
  for (const float temperature : {0.0f, 1.0f}) {
    const auto ids = on_device(logits, 4, 3, {.temperature = temperature, .top_k = 1}, 0);
    EXPECT_EQ(ids, (std::vector<int32_t>{-1, -1, -1, 0}));
  }
}

}  // namespace
}  // namespace twell
