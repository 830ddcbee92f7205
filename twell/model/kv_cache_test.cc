// SPDX-License-Identifier: Apache-2.0
#include "twell/model/kv_cache.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "twell/ops/attention/attention.h"

namespace twell {
namespace {

// Whatever its place in a head, a number that is not finite makes that head NaN, in its scale, and
// no other head: keys and values, of two layers, in the second block.
TEST(KvCache, ANumberThatIsNotFiniteMakesItsHeadNan) {
  ModelConfig config;
  config.layers = 2;
  config.heads = config.kv_heads = 3;
  config.head_dim = 8;
  config.width = 24;
  config.context = 64;
  constexpr int64_t kPosition = 17;  // the second row of the second block
  for (const float broken :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    for (int64_t at = 0; at < 24; ++at) {
      for (const bool of_keys : {true, false}) {
        KvCache cache(config, 1, 64, {.block_tokens = 16, .eight_bits = true});
        std::vector<float> keys(24), values(24);
        for (size_t i = 0; i < 24; ++i) {
          keys[i] = static_cast<float>(i) - 11.0f;
          values[i] = 5.0f - static_cast<float>(i);
        }
        (of_keys ? keys : values)[static_cast<size_t>(at)] = broken;
        cache.store(1, 0, kPosition, keys.data(), values.data());
        AttentionSequence sequence;
        cache.show(1, 0, kPosition + 1, sequence);
        const int64_t row = sequence.blocks[1] * 16 + 1;
        for (const bool key : {true, false}) {
          const AttentionRows8& rows = key ? sequence.k8 : sequence.v8;
          const std::vector<float>& from = key ? keys : values;
          for (int64_t head = 0; head < 3; ++head) {
            const float scale = rows.scale[row * 3 + head];
            if (key == of_keys && head == at / 8) {
              EXPECT_TRUE(std::isnan(scale)) << at;
              continue;
            }
            for (int64_t i = 8 * head; i < 8 * head + 8; ++i) {
              EXPECT_NEAR(static_cast<float>(rows.data[row * 24 + i]) * scale,
                          from[static_cast<size_t>(i)], 0.501f * scale)
                  << at << ", " << i;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace twell
