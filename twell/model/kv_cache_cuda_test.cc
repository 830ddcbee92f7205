// SPDX-License-Identifier: Apache-2.0
// Keys and values in 8 bits on the GPU have the bits of the CPU's cache.
#include "twell/model/kv_cache_cuda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"
#include "twell/model/kv_cache.h"
#include "twell/ops/attention/kv_bytes_cuda.h"

namespace twell {
namespace {

struct Shape {
  int64_t kv_heads, head_dim;
};

class EightBitCacheCudaTest : public testing::TestWithParam<Shape> {};

ModelConfig config_of(const Shape& shape) {
  ModelConfig config;
  config.width = 64;
  config.layers = 2;
  config.heads = config.kv_heads = shape.kv_heads;
  config.head_dim = shape.head_dim;
  config.context = 300;
  return config;
}

// Two sequences, one of them as long as its blocks, the other with some rows in its last block,
// among keys and values that are zero, large, tiny, infinite and NaN.
TEST_P(EightBitCacheCudaTest, StoreAndLoadEqualTheCpusCache) {
  TWELL_SKIP_WITHOUT_GPU();
  const ModelConfig config = config_of(GetParam());
  const int64_t width = config.kv_width(), hd = config.head_dim, stride = 2 * width + 16;
  const std::vector<int64_t> lengths = {128, 77};
  const int64_t tokens = 128 + 77;
  std::vector<__nv_bfloat16> rows = random_bf16(tokens * stride, 5);
  const auto head = [&](int64_t token, float scale, float first) {
    for (int64_t i = 0; i < hd; ++i) {
      __nv_bfloat16& value = rows[static_cast<size_t>(token * stride + i)];
      value = __float2bfloat16(__bfloat162float(value) * scale);
    }
    if (first != 0.0f) rows[static_cast<size_t>(token * stride)] = __float2bfloat16(first);
  };
  head(3, 0.0f, 0.0f);
  head(4, 1e-30f, 0.0f);
  head(5, 1e30f, 0.0f);
  head(6, 1.0f, std::numeric_limits<float>::infinity());
  head(7, 1.0f, -std::numeric_limits<float>::infinity());
  head(8, 1.0f, std::numeric_limits<float>::quiet_NaN());

  KvCacheCuda cache(config, 2, 128, 5, /*eight_bits=*/true);
  KvCache want(config, 2, 128, {.eight_bits = true}, 5);
  for (const int64_t slot : {0, 1}) {
    const std::vector<int32_t> table =
        slot == 0 ? std::vector<int32_t>{4, 0} : std::vector<int32_t>{3, 1};
    cache.set_table(slot, table);
    want.set_table(slot, table);
  }
  const CudaStream stream;
  cache.enqueue_tables(stream.get());
  const std::vector<float> floats = to_floats(rows);
  std::vector<int64_t> cache_rows;
  int64_t token = 0;
  for (const int64_t slot : {0, 1}) {
    for (int64_t at = 0; at < lengths[static_cast<size_t>(slot)]; ++at, ++token) {
      cache_rows.push_back(cache.row(slot, at));
      want.store(1, slot, at, floats.data() + token * stride,
                 floats.data() + token * stride + width);
    }
  }
  const auto device_rows = upload(rows);
  const auto device_cache_rows = upload(cache_rows);
  TWELL_CUDA_CHECK(launch_kv_store_bytes({.tokens = tokens,
                                          .kv_heads = config.kv_heads,
                                          .head_dim = hd,
                                          .k = device_rows.data(),
                                          .v = device_rows.data() + width,
                                          .stride = stride,
                                          .cache_rows = device_cache_rows.data(),
                                          .keys = cache.key_bytes(1),
                                          .values = cache.value_bytes(1)},
                                         stream.get()));
  const int64_t blocks = 5, values = blocks * kKvBlock * width;
  const auto k = poisoned<__nv_bfloat16>(values), v = poisoned<__nv_bfloat16>(values);
  const auto kv_len = upload(std::vector<int32_t>{128, 77});
  const auto kv_begin = upload(std::vector<int64_t>{cache.table_begin(0), cache.table_begin(1)});
  const auto first = upload(std::vector<int64_t>{3, 1});
  TWELL_CUDA_CHECK(launch_kv_load_bytes({.sequences = 2,
                                         .max_kv_len = 128,
                                         .kv_heads = config.kv_heads,
                                         .head_dim = hd,
                                         .kv_len = kv_len.data(),
                                         .kv_begin = kv_begin.data(),
                                         .tables = cache.tables(),
                                         .keys = cache.key_bytes(1),
                                         .values = cache.value_bytes(1),
                                         .first = first.data(),
                                         .k = k.data(),
                                         .v = v.data()},
                                        stream.get()));
  stream.synchronize();
  const auto read = [&](const KvBytes& from) {
    const int64_t count = cache.blocks() * kKvBlock;
    std::pair<std::vector<int8_t>, std::vector<float>> out;
    out.first.resize(static_cast<size_t>(count * width));
    out.second.resize(static_cast<size_t>(count * config.kv_heads));
    TWELL_CUDA_CHECK(
        cudaMemcpy(out.first.data(), from.data, out.first.size(), cudaMemcpyDeviceToHost));
    TWELL_CUDA_CHECK(cudaMemcpy(out.second.data(), from.scales, out.second.size() * sizeof(float),
                                cudaMemcpyDeviceToHost));
    return out;
  };
  const auto expect_part = [&](const AttentionSequence& s, const AttentionRows8& part,
                               const KvBytes& got_part, const DeviceBuffer<__nv_bfloat16>& copy,
                               int64_t slot) {
    const auto [bytes, scales] = read(got_part);
    const std::vector<float> wide = to_floats(download(copy));
    const int64_t length = lengths[static_cast<size_t>(slot)];
    for (int64_t at = 0; at < 128; ++at) {
      const int64_t to = ((slot == 0 ? 3 : 1) * kKvBlock + at) * width;
      if (at >= length) {
        for (int64_t i = 0; i < width; ++i) ASSERT_EQ(wide[static_cast<size_t>(to + i)], 0.0f);
        continue;
      }
      const int64_t from = s.blocks[at / kKvBlock] * int64_t{kKvBlock} + at % kKvBlock;
      const int64_t row = cache.row(slot, at);
      for (int64_t i = 0; i < width; ++i) {
        const int8_t byte = part.data[from * width + i];
        const float scale = part.scale[from * config.kv_heads + i / hd];
        const float got = scales[static_cast<size_t>(kv_scale(row, i / hd, config.kv_heads))];
        const float value = wide[static_cast<size_t>(to + i)];
        ASSERT_EQ(bytes[static_cast<size_t>(row * width + i)], byte) << at << ", " << i;
        if (std::isnan(scale)) {
          ASSERT_TRUE(std::isnan(got) && std::isnan(value)) << at << ", " << i;
        } else {
          ASSERT_EQ(got, scale) << at << ", " << i;
          ASSERT_EQ(value, __bfloat162float(__float2bfloat16(scale * static_cast<float>(byte))))
              << at << ", " << i;
        }
      }
    }
  };
  for (const int64_t slot : {0, 1}) {
    AttentionSequence s;
    want.show(1, slot, lengths[static_cast<size_t>(slot)], s);
    expect_part(s, s.k8, cache.key_bytes(1), k, slot);
    expect_part(s, s.v8, cache.value_bytes(1), v, slot);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, EightBitCacheCudaTest,
                         testing::Values(Shape{1, 8}, Shape{3, 24}, Shape{8, 64}, Shape{2, 80},
                                         Shape{5, 128}, Shape{2, 256}));

TEST(KvCacheCudaTest, EightBitsTakeHalfOfTheMemory) {
  const ModelConfig config = config_of({8, 64});
  EXPECT_EQ(KvCacheCuda::token_bytes(config), 2 * 2 * 8 * 128);
  EXPECT_EQ(KvCacheCuda::token_bytes(config, true), 2 * 2 * 8 * (64 + 4));
  EXPECT_EQ(KvCacheCuda::block_bytes(config, true),
            kKvBlock * KvCacheCuda::token_bytes(config, true));
  EXPECT_EQ(KvCacheCuda::bytes(config, 3, 65, true),
            3 * 2 * KvCacheCuda::block_bytes(config, true));
  TWELL_SKIP_WITHOUT_GPU();
  const KvCacheCuda wide(config, 1, 64), eight(config, 1, 64, 0, true);
  EXPECT_NE(wide.keys(1), nullptr);
  EXPECT_EQ(wide.key_bytes(1).data, nullptr);
  EXPECT_EQ(eight.keys(1), nullptr);
  EXPECT_NE(eight.key_bytes(1).data, nullptr);
}

}  // namespace
}  // namespace twell
