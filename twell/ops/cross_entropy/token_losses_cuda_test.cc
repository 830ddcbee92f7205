// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/cross_entropy/cross_entropy_cuda.h"

#include <gtest/gtest.h>

#include <cmath>

#include "twell/base/cuda_gtest.h"
#include "twell/base/rng.h"

namespace twell {
namespace {

TEST(TokenLossesCudaTest, EqualsDoublePrecision) {
  TWELL_SKIP_WITHOUT_GPU();
  const CudaStream stream;
  const int64_t tokens = 67;
  for (const int64_t vocab : {int64_t{3}, int64_t{257}, int64_t{5000}}) {
    std::vector<float> logits(static_cast<size_t>(tokens * vocab));
    for (size_t i = 0; i < logits.size(); ++i) logits[i] = 30.0f * normal(5, 1, i);
    std::vector<int32_t> targets(static_cast<size_t>(tokens));
    for (size_t m = 0; m < targets.size(); ++m) {
      targets[m] = m % 5 == 0 ? -1 : static_cast<int32_t>((m * 131) % static_cast<size_t>(vocab));
    }
    const auto device_logits = upload(logits);
    const auto device_targets = upload(targets);
    const auto losses = poisoned<float>(tokens);
    TWELL_CUDA_CHECK(launch_token_losses(
        {tokens, vocab, device_logits.data(), device_targets.data(), losses.data()}, stream.get()));
    stream.synchronize();
    const auto got = download(losses);
    for (size_t m = 0; m < targets.size(); ++m) {
      double want = 0.0;
      if (targets[m] >= 0) {
        const float* row = logits.data() + m * static_cast<size_t>(vocab);
        double sum = 0.0;
        for (int64_t i = 0; i < vocab; ++i) {
          sum += std::exp(static_cast<double>(row[i]) - row[targets[m]]);
        }
        want = std::log(sum);
      }
      ASSERT_NEAR(got[m], want, 1e-5 * (1.0 + std::abs(want))) << m;
    }
  }
}

}  // namespace
}  // namespace twell
