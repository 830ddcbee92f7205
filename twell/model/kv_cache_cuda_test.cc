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

constexpr int64_t kSequenceLengths[] = {128, 77};
constexpr int64_t kTokens = 128 + 77;
constexpr int64_t kFirstBlock[] = {3, 1};  // where the copy has each sequence
constexpr int64_t kBlocks = 5;

int64_t stride_of(const ModelConfig& config) { return 2 * config.kv_width() + 16; }

// Keys and values, of which some heads are zero, large, tiny, infinite and NaN.
std::vector<__nv_bfloat16> awkward_rows(const ModelConfig& config) {
  const int64_t stride = stride_of(config);
  std::vector<__nv_bfloat16> rows = random_bf16(kTokens * stride, 5);
  const auto head = [&](int64_t token, float scale, float first) {
    for (int64_t i = 0; i < config.head_dim; ++i) {
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
  return rows;
}

// A cache of the GPU and one of the CPU, with the same blocks, which hold the same rows in layer 1.
struct Caches {
  Caches(const ModelConfig& of, const std::vector<__nv_bfloat16>& rows, cudaStream_t stream)
      : config(of),
        gpu(of, 2, 128, kBlocks, /*eight_bits=*/true),
        cpu(of, 2, 128, {.eight_bits = true}, kBlocks) {
    for (const int64_t slot : {0, 1}) {
      const std::vector<int32_t> table =
          slot == 0 ? std::vector<int32_t>{4, 0} : std::vector<int32_t>{3, 1};
      gpu.set_table(slot, table);
      cpu.set_table(slot, table);
    }
    gpu.enqueue_tables(stream);
    store(rows, stream);
  }

  void store(const std::vector<__nv_bfloat16>& rows, cudaStream_t stream) {
    const int64_t stride = stride_of(config), width = config.kv_width();
    const std::vector<float> floats = to_floats(rows);
    std::vector<int64_t> cache_rows;
    int64_t token = 0;
    for (const int64_t slot : {0, 1}) {
      for (int64_t at = 0; at < kSequenceLengths[slot]; ++at, ++token) {
        cache_rows.push_back(gpu.row(slot, at));
        cpu.store(1, slot, at, floats.data() + token * stride,
                  floats.data() + token * stride + width);
      }
    }
    const auto device_rows = upload(rows);
    const auto device_cache_rows = upload(cache_rows);
    TWELL_CUDA_CHECK(launch_kv_store_bytes({.tokens = kTokens,
                                            .kv_heads = config.kv_heads,
                                            .head_dim = config.head_dim,
                                            .k = device_rows.data(),
                                            .v = device_rows.data() + width,
                                            .stride = stride,
                                            .cache_rows = device_cache_rows.data(),
                                            .keys = gpu.key_bytes(1),
                                            .values = gpu.value_bytes(1)},
                                           stream));
    TWELL_CUDA_CHECK(cudaStreamSynchronize(stream));
  }

  ModelConfig config;
  KvCacheCuda gpu;
  KvCache cpu;
};

// What the GPU makes of layer 1 in bf16.
struct Copies {
  Copies(const Caches& caches, cudaStream_t stream)
      : k(poisoned<__nv_bfloat16>(kBlocks * kKvBlock * caches.config.kv_width())),
        v(poisoned<__nv_bfloat16>(kBlocks * kKvBlock * caches.config.kv_width())) {
    const auto kv_len = upload(std::vector<int32_t>{128, 77});
    const auto kv_begin =
        upload(std::vector<int64_t>{caches.gpu.table_begin(0), caches.gpu.table_begin(1)});
    const auto first = upload(std::vector<int64_t>(std::begin(kFirstBlock), std::end(kFirstBlock)));
    TWELL_CUDA_CHECK(launch_kv_load_bytes({.sequences = 2,
                                           .max_kv_len = 128,
                                           .kv_heads = caches.config.kv_heads,
                                           .head_dim = caches.config.head_dim,
                                           .kv_len = kv_len.data(),
                                           .kv_begin = kv_begin.data(),
                                           .tables = caches.gpu.tables(),
                                           .keys = caches.gpu.key_bytes(1),
                                           .values = caches.gpu.value_bytes(1),
                                           .first = first.data(),
                                           .k = k.data(),
                                           .v = v.data()},
                                          stream));
    TWELL_CUDA_CHECK(cudaStreamSynchronize(stream));
  }
  DeviceBuffer<__nv_bfloat16> k, v;
};

// Compares keys or values of a sequence: `got` and `copy` of the GPU with `want` of the CPU.
void expect_part(const Caches& caches, int64_t slot, const AttentionSequence& s,
                 const AttentionRows8& want, const KvBytes& got,
                 const DeviceBuffer<__nv_bfloat16>& copy) {
  const int64_t width = caches.config.kv_width(), hd = caches.config.head_dim;
  const int64_t heads = caches.config.kv_heads, count = caches.gpu.blocks() * kKvBlock;
  std::vector<int8_t> bytes(static_cast<size_t>(count * width));
  std::vector<float> scales(static_cast<size_t>(count * heads));
  TWELL_CUDA_CHECK(cudaMemcpy(bytes.data(), got.data, bytes.size(), cudaMemcpyDeviceToHost));
  TWELL_CUDA_CHECK(
      cudaMemcpy(scales.data(), got.scales, scales.size() * sizeof(float), cudaMemcpyDeviceToHost));
  const std::vector<float> wide = to_floats(download(copy));
  for (int64_t at = 0; at < 128; ++at) {
    const int64_t to = (kFirstBlock[slot] * kKvBlock + at) * width;
    if (at >= kSequenceLengths[slot]) {
      for (int64_t i = 0; i < width; ++i) ASSERT_EQ(wide[static_cast<size_t>(to + i)], 0.0f);
      continue;
    }
    const int64_t from = s.blocks[at / kKvBlock] * int64_t{kKvBlock} + at % kKvBlock;
    const int64_t row = caches.gpu.row(slot, at);
    for (int64_t i = 0; i < width; ++i) {
      const int8_t byte = want.data[from * width + i];
      const float scale = want.scale[from * heads + i / hd];
      const float got_scale = scales[static_cast<size_t>(kv_scale(row, i / hd, heads))];
      const float value = wide[static_cast<size_t>(to + i)];
      ASSERT_EQ(bytes[static_cast<size_t>(row * width + i)], byte) << at << ", " << i;
      if (std::isnan(scale)) {
        ASSERT_TRUE(std::isnan(got_scale) && std::isnan(value)) << at << ", " << i;
      } else {
        ASSERT_EQ(got_scale, scale) << at << ", " << i;
        ASSERT_EQ(value, __bfloat162float(__float2bfloat16(scale * static_cast<float>(byte))))
            << at << ", " << i;
      }
    }
  }
}

// Two sequences, one of them as long as its blocks, the other with some rows in its last block.
TEST_P(EightBitCacheCudaTest, StoreAndLoadEqualTheCpusCache) {
  TWELL_SKIP_WITHOUT_GPU();
  const ModelConfig config = config_of(GetParam());
  const CudaStream stream;
  const Caches caches(config, awkward_rows(config), stream.get());
  const Copies copies(caches, stream.get());
  for (const int64_t slot : {0, 1}) {
    AttentionSequence s;
    caches.cpu.show(1, slot, kSequenceLengths[slot], s);
    expect_part(caches, slot, s, s.k8, caches.gpu.key_bytes(1), copies.k);
    expect_part(caches, slot, s, s.v8, caches.gpu.value_bytes(1), copies.v);
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
