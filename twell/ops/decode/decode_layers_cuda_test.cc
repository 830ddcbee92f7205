// SPDX-License-Identifier: Apache-2.0
// The words that CTAs exchange, over many calls: model/decode_cuda_test.cc compares results with
// the CPU.
#include "twell/ops/decode/decode_layers.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"

namespace twell {
namespace {

constexpr int64_t kWidth = 256, kFfn = 1024, kHeads = 4, kKvHeads = 2, kHeadDim = 64;
constexpr int kLayers = 3;
constexpr int64_t kLength = 700;  // keys in several segments
constexpr int64_t kTableSize = (kLength + kKvBlock - 1) / kKvBlock;

std::vector<__nv_bfloat16> weights(int64_t rows, int64_t cols, uint64_t seed) {
  std::vector<__nv_bfloat16> out = random_bf16(rows * cols, seed);
  const float scale = 1.0f / std::sqrt(static_cast<float>(cols));
  for (__nv_bfloat16& value : out) value = __float2bfloat16(__bfloat162float(value) * scale);
  return out;
}

// Decoding steps of `tokens` sequences, each of the same input.
class Steps {
 public:
  Steps(int tokens, bool sparse)
      : x_values_(random_bf16(tokens * kWidth, 1)), x_(upload(x_values_)) {
    shape_ = {.multiprocessors = CudaContext(stream_.get()).multiprocessors(),
              .tokens = tokens,
              .width = kWidth,
              .heads = kHeads,
              .kv_heads = kKvHeads,
              .head_dim = kHeadDim,
              .max_length = kLength};
    memory_ = DeviceBuffer<uint8_t>(decode_workspace_bytes(shape_));
    TWELL_CUDA_CHECK(cudaMemset(memory_.data(), 0, static_cast<size_t>(memory_.size())));
    const int64_t kv_width = kKvHeads * kHeadDim, rows = tokens * kTableSize * kKvBlock;
    std::vector<int32_t> positions, kv_len, tables;
    std::vector<int64_t> cache_rows, kv_begin;
    for (int i = 0; i < tokens; ++i) {
      const auto length = static_cast<int32_t>(kLength - 300 * i);
      kv_len.push_back(length);
      positions.push_back(length - 1);
      kv_begin.push_back(i * kTableSize);
      for (int64_t block = 0; block < kTableSize; ++block) {
        tables.push_back(static_cast<int32_t>(i * kTableSize + block));
      }
      cache_rows.push_back(kv_row(
          tables[static_cast<size_t>(i * kTableSize + (length - 1) / kKvBlock)], length - 1));
    }
    const auto keep = [&](std::vector<__nv_bfloat16> values) {
      kept_.push_back(upload(values));
      return kept_.back().data();
    };
    positions_ = upload(positions);
    kv_len_ = upload(kv_len);
    tables_ = upload(tables);
    cache_rows_ = upload(cache_rows);
    kv_begin_ = upload(kv_begin);
    rotation_ = upload(std::vector<float>(static_cast<size_t>(kLength * kHeadDim / 2), 0.6f));
    problem_ = {.tokens = tokens,
                .layers = kLayers,
                .width = static_cast<int>(kWidth),
                .ffn = static_cast<int>(kFfn),
                .heads = static_cast<int>(kHeads),
                .kv_heads = static_cast<int>(kKvHeads),
                .head_dim = static_cast<int>(kHeadDim),
                .cos = rotation_.data(),
                .sin = rotation_.data(),
                .positions = positions_.data(),
                .cache_rows = cache_rows_.data(),
                .tables = tables_.data(),
                .kv_begin = kv_begin_.data(),
                .kv_len = kv_len_.data(),
                .x = x_.data(),
                .workspace = decode_workspace(shape_, memory_.data())};
    for (int layer = 0; layer < kLayers; ++layer) {
      const auto seed = static_cast<uint64_t>(100 * layer);
      problem_.layer[layer] = {
          .attention_norm = keep(random_bf16(kWidth, seed + 2)),
          .w_qkv = keep(weights((kHeads + 2 * kKvHeads) * kHeadDim, kWidth, seed + 3)),
          .w_o = keep(weights(kWidth, kHeads * kHeadDim, seed + 4)),
          .ffn_norm = keep(random_bf16(kWidth, seed + 5)),
          .w_gate = keep(weights(kFfn, kWidth, seed + 6)),
          .w_up = keep(weights(kFfn, kWidth, seed + 7)),
          .w_down = keep(weights(kFfn, kWidth, seed + 8)),
          .keys = keep(random_bf16(rows * kv_width, seed + 9)),
          .values = keep(random_bf16(rows * kv_width, seed + 10)),
          .sparse = sparse};
    }
  }

  // What an early call left in every word: a tag that comes again, with a value that must not be
  // read.
  void leave_words(uint32_t tag) {
    const DecodeWorkspace& w = problem_.workspace;
    const std::vector<uint64_t> words(static_cast<size_t>(w.words_end() - w.x),
                                      uint64_t{tag} << 32 | 0x7fc07fc0u);
    TWELL_CUDA_CHECK(
        cudaMemcpy(w.x, words.data(), words.size() * sizeof(uint64_t), cudaMemcpyHostToDevice));
  }
  void set_tags_used(uint32_t used) {
    TWELL_CUDA_CHECK(
        cudaMemcpy(problem_.workspace.state, &used, sizeof used, cudaMemcpyHostToDevice));
  }
  uint32_t tags_used() const {
    uint32_t used = 0;
    TWELL_CUDA_CHECK(
        cudaMemcpy(&used, problem_.workspace.state, sizeof used, cudaMemcpyDeviceToHost));
    return used;
  }
  std::vector<float> step() {
    TWELL_CUDA_CHECK(cudaMemcpy(x_.data(), x_values_.data(),
                                x_values_.size() * sizeof(__nv_bfloat16), cudaMemcpyHostToDevice));
    TWELL_CUDA_CHECK(launch_decode_layers_sm90(problem_, stream_.get()));
    stream_.synchronize();
    return to_floats(download(x_));
  }

 private:
  CudaStream stream_;
  DecodeWorkspaceShape shape_;
  std::vector<__nv_bfloat16> x_values_;
  DeviceBuffer<__nv_bfloat16> x_;
  DeviceBuffer<uint8_t> memory_;
  DeviceBuffer<float> rotation_;
  DeviceBuffer<int32_t> positions_, kv_len_, tables_;
  DeviceBuffer<int64_t> cache_rows_, kv_begin_;
  std::vector<DeviceBuffer<__nv_bfloat16>> kept_;
  DecodeLayers problem_;
};

TEST(DecodeLayersCudaTest, TagsStartAgainBeforeTheyRunOut) {
  TWELL_SKIP_WITHOUT_GPU();
  if (decode_layers_max_tokens(kWidth, kHeads * kHeadDim, kFfn, kHeadDim) < 2) {
    GTEST_SKIP() << "the kernel of all layers needs Hopper";
  }
  constexpr uint32_t kTagsOfCall = kLayers + 1;
  for (const int tokens : {1, 2}) {
    for (const bool sparse : {false, true}) {
      SCOPED_TRACE(testing::Message() << tokens << " tokens, sparse: " << sparse);
      const std::vector<float> want = Steps(tokens, sparse).step();
      for (const float value : want) ASSERT_TRUE(std::isfinite(value));
      Steps steps(tokens, sparse);
      EXPECT_EQ(steps.step(), want);
      EXPECT_EQ(steps.tags_used(), kTagsOfCall);
      // Every word of the calls after the last possible tag, and the tag of words never written.
      for (const uint32_t left : {0u, 1u, 2u, kTagsOfCall, kTagsOfCall + 2}) {
        SCOPED_TRACE(testing::Message() << "words with tag " << left);
        steps.leave_words(left);
        constexpr uint32_t kLast = ~0u - kMaxDecodeLayers - 1;
        uint32_t used = kLast - 2 * kTagsOfCall;
        steps.set_tags_used(used);
        for (int call = 0; call < 40; ++call) {  // without a new start the tags would wrap around
          ASSERT_EQ(steps.step(), want) << "call " << call;
          const uint32_t now = steps.tags_used();
          EXPECT_EQ(now, used == kLast ? 0 : used + kTagsOfCall);
          used = now;
        }
      }
    }
  }
}

}  // namespace
}  // namespace twell
