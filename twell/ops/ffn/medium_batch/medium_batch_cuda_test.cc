// SPDX-License-Identifier: Apache-2.0
// Inputs are small integers, so that every sum is exact in f32 and y has one right answer to the
// bit: only the roundings of g, of h and of y to bf16 are left, and the test makes the same ones.
#include "twell/ops/ffn/medium_batch/medium_batch_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"

namespace twell {
namespace {

struct MediumBatchCase {
  const char* name;
  int64_t tokens, width, ffn;
  int bias;  // of every neuron: sets how many fire
  bool gated = true, squared = false, add = false;
};

class MediumBatchCudaTest : public testing::TestWithParam<MediumBatchCase> {};

TEST_P(MediumBatchCudaTest, IsTheDenseLayerToTheBitAndRepeats) {
  TWELL_HOPPER_TEST();
  const MediumBatchCase& c = GetParam();
  const int64_t tokens = c.tokens, width = c.width, ffn = c.ffn;
  std::vector<int8_t> x = random_signs(tokens * width, 1), first = random_signs(ffn * width, 2);
  const std::vector<int8_t> up = random_signs(ffn * width, 3), down = random_signs(ffn * width, 4),
                            before = random_signs(tokens * width, 5);
  for (int64_t m = 0; m < tokens; ++m) x[static_cast<size_t>(m * width)] = 1;
  for (int64_t n = 0; n < ffn; ++n) {
    first[static_cast<size_t>(n * width)] = static_cast<int8_t>(c.bias);
  }
  std::vector<float> want(static_cast<size_t>(tokens * width));
  if (c.add) want.assign(before.begin(), before.end());
  unsigned long long nonzeros = 0;
  std::vector<unsigned long long> unions(static_cast<size_t>((tokens + 127) / 128));
  for (int64_t n = 0; n < ffn; ++n) {
    int64_t last = -1;  // tile that this neuron is counted for
    for (int64_t m = 0; m < tokens; ++m) {
      const int8_t* row = x.data() + m * width;
      const int sum = dot_of_signs(row, first.data() + n * width, width);
      if (sum <= 0) continue;
      ++nonzeros;
      if (m / 128 != last) ++unions[static_cast<size_t>(m / 128)];
      last = m / 128;
      const float g = rounded_to_bf16(static_cast<float>(sum));
      float h =
          c.gated ? static_cast<float>(dot_of_signs(row, up.data() + n * width, width)) : 1.0f;
      if (c.squared) h *= g;
      h = rounded_to_bf16(h * g);
      for (int64_t d = 0; d < width; ++d) {
        want[static_cast<size_t>(m * width + d)] += h * static_cast<float>(down[n * width + d]);
      }
    }
  }
  const auto device_x = upload(to_bf16s(x)), device_first = upload(to_bf16s(first)),
             device_up = upload(to_bf16s(up)), device_down = upload(to_bf16s(down));
  const auto activity = upload(std::vector<ActivityCuda>(1));
  const int64_t values = MediumBatchWorkspace::values(tokens, ffn),
                words = MediumBatchWorkspace::words(tokens, ffn);
  const auto gate = poisoned<__nv_bfloat16>(values), h = poisoned<__nv_bfloat16>(values);
  const auto lists = poisoned<uint32_t>(words);
  const MediumBatchWorkspace workspace =
      MediumBatchWorkspace::in(tokens, ffn, gate.data(), h.data(), lists.data(), words);
  EXPECT_THROW(
      MediumBatchWorkspace::in(tokens, ffn, gate.data(), h.data(), lists.data(), words - 1), Error);
  const auto run = [&] {
    const auto y = c.add ? upload(to_bf16s(before)) : poisoned<__nv_bfloat16>(tokens * width);
    medium_batch_ffn_cuda(ctx,
                          {.tokens = tokens,
                           .width = width,
                           .ffn = ffn,
                           .x = device_x.data(),
                           .w_gate = c.gated ? device_first.data() : nullptr,
                           .w_up = c.gated ? device_up.data() : device_first.data(),
                           .w_down = device_down.data(),
                           .y = y.data(),
                           .add = c.add,
                           .activity = activity.data(),
                           .squared = c.squared},
                          workspace);
    stream.synchronize();
    return download(y);
  };
  const auto once = run();
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(__bfloat162float(once[i]), rounded_to_bf16(want[i]))
        << "token " << static_cast<int64_t>(i) / width << " column "
        << static_cast<int64_t>(i) % width;
  }
  const auto counted = download(activity);
  EXPECT_EQ(counted[0].nnz, nonzeros);
  EXPECT_EQ(counted[0].tokens, static_cast<unsigned long long>(tokens));
  if (tokens <= 64) unions.assign(unions.size(), 0);  // these calls count none
  const unsigned long long calls = tokens <= 64 ? 0 : 1;
  EXPECT_EQ(counted[0].unions, calls * unions.size());
  EXPECT_EQ(counted[0].union_neurons, std::accumulate(unions.begin(), unions.end(), 0ull));
  EXPECT_EQ(counted[0].union_calls, calls);
  const unsigned long long largest = *std::max_element(unions.begin(), unions.end());
  EXPECT_EQ(counted[0].largest_union, largest);
  const auto again = run();
  EXPECT_EQ(std::memcmp(once.data(), again.data(), once.size() * sizeof(once[0])), 0);
  const auto both = download(activity);
  EXPECT_EQ(both[0].union_calls, 2 * calls);
  EXPECT_EQ(both[0].largest_union, 2 * largest);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, MediumBatchCudaTest,
    testing::Values(MediumBatchCase{"smallest", 1, 8, 8, 0},
                    MediumBatchCase{"nine", 9, 1096, 520, -30},
                    MediumBatchCase{"64 tokens", 64, 72, 264, -3, true, false, true},
                    MediumBatchCase{"65 tokens", 65, 72, 264, -3},
                    MediumBatchCase{"one tile", 128, 136, 1000, -10},
                    MediumBatchCase{"129", 129, 320, 1000, -20},
                    // Two tokens of the last tile; a union longer than a round of chunks.
                    MediumBatchCase{"half fires", 258, 64, 2056, 0},
                    MediumBatchCase{"all fire", 130, 40, 520, 120},
                    MediumBatchCase{"none fires", 200, 64, 264, -120},
                    MediumBatchCase{"five tiles", 520, 72, 776, -8},
                    // More k-steps than stages; a cluster of which half is past the last segment.
                    MediumBatchCase{"wide", 257, 1096, 520, -30},
                    MediumBatchCase{"two wide tiles", 200, 1096, 520, -30},
                    MediumBatchCase{"no gate", 300, 72, 264, -3, false},
                    MediumBatchCase{"squared", 257, 24, 264, -6, true, true},
                    MediumBatchCase{"squared without gate", 140, 24, 264, -6, false, true},
                    MediumBatchCase{"added", 257, 72, 264, -6, true, false, true}),
    [](const auto& of) {
      std::string name;
      for (const char* c = of.param.name; *c != 0; ++c) {
        if (std::isalnum(static_cast<unsigned char>(*c)) != 0) name += *c;
      }
      return name;
    });

}  // namespace
}  // namespace twell
