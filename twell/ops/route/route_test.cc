// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/route/route.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

namespace twell::route {
namespace {

Layers llama(int64_t one_kernel_tokens) {
  return {.head_dim = 64, .norm_tokens = 8, .one_kernel_tokens = one_kernel_tokens};
}

Batch decode(int64_t tokens, int64_t keys) {
  return {.tokens = tokens, .cached = true, .most_new = 1, .most_keys = keys};
}

TEST(LayersPaths, Decoding) {
  for (const int64_t tokens : {1, 2, 4}) {
    EXPECT_EQ(layers_path(llama(8), decode(tokens, 10)), LayersPath::kOneKernel);
    EXPECT_EQ(layers_path(llama(tokens - 1), decode(tokens, 10)), LayersPath::kFewKernels);
  }
  for (const int64_t tokens : {5, 8}) {
    EXPECT_EQ(layers_path(llama(8), decode(tokens, 10)), LayersPath::kFewKernels);
    Layers layers = llama(8);
    layers.norm_tokens = tokens - 1;
    EXPECT_EQ(layers_path(layers, decode(tokens, 10)), LayersPath::kOneKernel);
  }
  // Where layers are sparse, one kernel pays up to three sequences.
  Layers sparse = llama(8);
  sparse.sparse = true;
  EXPECT_EQ(layers_path(sparse, decode(3, 10)), LayersPath::kOneKernel);
  EXPECT_EQ(layers_path(sparse, decode(4, 10)), LayersPath::kFewKernels);
  // Fewer where streams of rows are faster.
  sparse.stream_tokens = 2;
  EXPECT_EQ(layers_path(sparse, decode(1, 10)), LayersPath::kOneKernel);
  EXPECT_EQ(layers_path(sparse, decode(2, 10)), LayersPath::kFewKernels);
  sparse.norm_tokens = 1;  // which take at most one token here
  EXPECT_EQ(layers_path(sparse, decode(2, 10)), LayersPath::kOneKernel);
  // No few kernels take projections in e4m3.
  Layers in_bytes = llama(8);
  in_bytes.in_bytes = true;
  for (const bool sparse_ones : {false, true}) {
    in_bytes.sparse = sparse_ones;
    EXPECT_EQ(layers_path(in_bytes, decode(4, 10)), LayersPath::kOneKernel);
    EXPECT_EQ(layers_path(in_bytes, decode(5, 10)), LayersPath::kSingleOps);
  }
  EXPECT_EQ(layers_path(llama(8), decode(1, 100'000)), LayersPath::kOneKernel);
  EXPECT_EQ(layers_path(llama(8), decode(5, 100'000)), LayersPath::kFewKernels);
  Batch batch = decode(5, 10);
  batch.one_kernel = true;
  EXPECT_EQ(layers_path(llama(8), batch), LayersPath::kOneKernel);
  batch.observed = true;
  EXPECT_EQ(layers_path(llama(8), batch), LayersPath::kSingleOps);
  batch = decode(1, 10);
  batch.cached = false;
  EXPECT_EQ(layers_path(llama(8), batch), LayersPath::kSingleOps);
  for (const int64_t tokens : {9, 63, 64, 65, 128}) {
    EXPECT_EQ(layers_path(llama(8), decode(tokens, 10)), LayersPath::kSingleOps);
  }
  // Several new tokens of one sequence.
  batch = {.tokens = 5, .cached = true, .most_new = 5, .most_keys = 5};
  EXPECT_EQ(layers_path(llama(8), batch), LayersPath::kFewKernels);
}

// The times are measured ones, of D 4096 and 2048.
TEST(LayersPaths, StreamsOfRows) {
  constexpr int64_t kWide = 224'000'000, kNarrow = 57'000'000;  // bytes of a layer
  EXPECT_TRUE(stream_pays(52.0, 37.8, false, 1, kWide));
  EXPECT_FALSE(stream_pays(52.0, 37.8, true, 1, kWide));
  EXPECT_FALSE(stream_pays(36.5, 30.3, false, 1, kWide));
  EXPECT_TRUE(stream_pays(38.7, 32.2, false, 2, kWide));
  EXPECT_FALSE(stream_pays(14.2, 13.4, false, 1, kNarrow));
  EXPECT_TRUE(stream_pays(18.3, 14.3, false, 2, kNarrow));
}

TEST(SparseRequests, AreTwoWhereReadingTakesLongerThanTheSteps) {
  EXPECT_EQ(sparse_requests(224'000'000), 2);
  EXPECT_EQ(sparse_requests(88'000'000), 2);
  EXPECT_EQ(sparse_requests(57'000'000), 1);
}

// The kernel of all layers attends to all keys, also where a caller asks for it.
TEST(LayersPaths, SlidingWindow) {
  Layers layers = llama(8);
  layers.window = 100;
  for (const bool asked : {false, true}) {
    Batch batch = decode(2, 100);
    batch.one_kernel = asked;
    EXPECT_EQ(layers_path(layers, batch), LayersPath::kOneKernel);
    batch = decode(2, 101);
    batch.one_kernel = asked;
    EXPECT_EQ(layers_path(layers, batch), LayersPath::kFewKernels);
  }
}

TEST(LayersPaths, OnlyLayersThatSuit) {
  const auto path = [](const Layers& layers) {
    return layers_path(layers, {.tokens = 4, .cached = true, .most_new = 2});
  };
  EXPECT_EQ(path(llama(8)), LayersPath::kFewKernels);
  Layers layers = llama(8);
  layers.qk_norm = true;
  EXPECT_EQ(path(layers), LayersPath::kSingleOps);
  EXPECT_EQ(one_kernel_tokens(layers, 24, 128, 8), 0);
  layers = llama(8);
  layers.head_dim = 24;
  EXPECT_EQ(path(layers), LayersPath::kSingleOps);
  layers = llama(8);
  layers.norm_tokens = 3;
  EXPECT_EQ(path(layers), LayersPath::kSingleOps);
  layers = llama(8);
  layers.norm_tokens = 0;
  layers.relu = false;
  EXPECT_EQ(path(layers), LayersPath::kSingleOps);
  EXPECT_EQ(one_kernel_tokens(layers, 24, 128, 8), 0);
  for (const bool ffn : {false, true}) {
    layers = llama(8);
    (ffn ? layers.biased : layers.o_bias) = true;
    EXPECT_EQ(path(layers), ffn ? LayersPath::kFewKernels : LayersPath::kSingleOps);
    EXPECT_EQ(one_kernel_tokens(layers, 24, 128, 8), 0);
  }
  layers = llama(8);
  layers.relu = false;
  EXPECT_EQ(path(layers), LayersPath::kFewKernels);
  EXPECT_EQ(one_kernel_tokens(layers, 24, 128, 8), 0);
  EXPECT_EQ(one_kernel_tokens(llama(0), 24, 128, 8), 8);
  EXPECT_EQ(one_kernel_tokens(llama(0), 129, 128, 8), 0);
}

TEST(GateScreen, PaysForFewActiveNeurons) {
  EXPECT_TRUE(gate_screen_pays(-1.0, 5632));
  EXPECT_TRUE(gate_screen_pays(70.0, 5632));
  EXPECT_FALSE(gate_screen_pays(71.0, 5632));
}

TEST(LayersPaths, Thresholds) {
  EXPECT_FALSE(norm_apart(3));
  EXPECT_TRUE(norm_apart(4));
  EXPECT_FALSE(sorts_rows_by_id(511, false));
  EXPECT_TRUE(sorts_rows_by_id(512, false));
  EXPECT_FALSE(sorts_rows_by_id(100'000, true));
}

// Every number of rows up to one that is beyond all limits, on both kinds of GPU.
TEST(LinearKernels, EveryNumberOfRows) {
  for (const bool hopper : {false, true}) {
    for (const int64_t row_tokens : {0, 3, 8}) {
      for (const int64_t cols : {2048, 2052, 16896, 16904}) {
        for (int64_t rows = 1; rows <= 130; ++rows) {
          const bool fits = rows <= row_tokens;
          const bool batch = hopper && rows <= 64 && cols != 2052 && cols <= 16896;
          EXPECT_EQ(
              linear_kernel({.hopper = hopper, .multiprocessors = 132}, rows, cols, row_tokens),
              fits    ? LinearKernel::kSkinny
              : batch ? LinearKernel::kBatch
                      : LinearKernel::kGemm)
              << hopper << " " << row_tokens << " " << cols << " " << rows;
        }
      }
    }
  }
}

TEST(PaddedRows, AreFewNumbers) {
  for (int64_t tokens = 1; tokens <= 8; ++tokens) EXPECT_EQ(padded_rows(tokens), tokens);
  EXPECT_EQ(padded_rows(9), 16);
  EXPECT_EQ(padded_rows(16), 16);
  EXPECT_EQ(padded_rows(113), 128);
  EXPECT_EQ(padded_rows(128), 128);
  EXPECT_EQ(padded_rows(129), 256);
  EXPECT_EQ(padded_rows(16385), 16512);
}

TEST(Gemms, PreferProposalsByRows) {
  for (const int64_t rows : {1, 16, 63}) {
    EXPECT_FALSE(gemm_rules(rows).follows_rules || gemm_rules(rows).proven_tiles) << rows;
  }
  const auto rules = [](int64_t rows) {
    const GemmRules r = gemm_rules(rows);
    EXPECT_TRUE(r.follows_rules && !r.proven_tiles) << rows;
    return std::tuple(r.medium_tiles, r.full_wave, r.few_clusters_of_four);
  };
  EXPECT_EQ(rules(64), std::tuple(false, true, true));
  EXPECT_EQ(rules(72), std::tuple(false, true, false));
  EXPECT_EQ(rules(73), std::tuple(false, false, false));
  EXPECT_EQ(rules(255), std::tuple(false, false, false));
  EXPECT_EQ(rules(256), std::tuple(true, false, false));
  EXPECT_EQ(rules(2047), std::tuple(true, false, false));
  EXPECT_TRUE(gemm_rules(2048).proven_tiles);
  EXPECT_FALSE(gemm_rules(2048).follows_rules);
}

TEST(Gemms, BitsAreKnownOfLargeWholeSizes) {
  EXPECT_TRUE(gemm_bits_known(64, 5632, 2048, false));
  EXPECT_FALSE(gemm_bits_known(63, 5632, 2048, false));
  EXPECT_FALSE(gemm_bits_known(64, 5632, 2048, true));  // weight gradients: at least 512 rows
  EXPECT_TRUE(gemm_bits_known(576, 5632, 2048, true));
  EXPECT_FALSE(gemm_bits_known(577, 5632, 2048, true));
  EXPECT_FALSE(gemm_bits_known(64, 5600, 2048, false));
  EXPECT_FALSE(gemm_bits_known(64, 448, 2048, false));
  EXPECT_FALSE(gemm_bits_known(64, 5632, 2112, false));
}

TEST(Qkv, IsFusedForManyTokens) {
  EXPECT_FALSE(fused_qkv_pays(1023));
  EXPECT_TRUE(fused_qkv_pays(1024));
}

TEST(Attention, KernelsByQueries) {
  EXPECT_EQ(attention_kernel(1, true), AttentionKernel::kDecode);
  EXPECT_EQ(attention_kernel(1, false), AttentionKernel::kOther);
  EXPECT_EQ(attention_kernel(2, true), AttentionKernel::kOther);
  EXPECT_FALSE(ragged_attention_pays(127));
  EXPECT_TRUE(ragged_attention_pays(128));
}

TEST(Attention, DividesKeys) {
  const auto divide = [](const AttentionHeads& heads, int64_t sequences, int64_t keys) {
    const AttentionDivision d = attention_division(heads, sequences, keys, 132);
    return std::tuple(d.splits, d.warps, d.loads);
  };
  const AttentionHeads plain{.heads = 32, .kv_heads = 32, .head_dim = 64};
  EXPECT_EQ(divide(plain, 1, 256), std::tuple(1, 8, 8));
  EXPECT_EQ(divide(plain, 1, 2000), std::tuple(8, 8, 8));
  EXPECT_EQ(divide(plain, 8, 2049), std::tuple(2, 4, 8));
  EXPECT_EQ(divide(plain, 66, 256), std::tuple(1, 1, 8));
  EXPECT_EQ(divide(plain, 67, 256), std::tuple(1, 1, 4));
  EXPECT_EQ(divide({.heads = 32, .kv_heads = 8, .head_dim = 256}, 8, 2000), std::tuple(2, 4, 8));
  EXPECT_EQ(divide({.heads = 32, .kv_heads = 32, .head_dim = 64, .eight_bits = true}, 256, 256),
            std::tuple(1, 4, 4));
}

// A workspace for N sequences has room for the divisions of every smaller batch, which may divide
// keys that N sequences leave whole.
TEST(Attention, AWorkspaceHoldsTheDivisionsOfSmallerBatches) {
  for (const auto& [heads, kv_heads, head_dim] :
       {std::tuple(32, 1, 64), std::tuple(32, 2, 128), std::tuple(32, 8, 64),
        std::tuple(32, 32, 64), std::tuple(7, 1, 256), std::tuple(1, 1, 8)}) {
    for (const int64_t keys : {1, 256, 257, 300, 2048, 2049, 16'384, 131'073, 1 << 20}) {
      for (const int sms : {16, 132, 1000}) {
        for (const bool eight_bits : {false, true}) {
          int64_t needed = 0;  // by batches so far that divide keys
          for (int64_t n = 1; n <= 4096; ++n) {
            const int64_t splits =
                attention_division({heads, kv_heads, head_dim, eight_bits}, n, keys, sms).splits;
            if (splits > 1) needed = std::max(needed, n * splits);
            ASSERT_LE(needed, attention_partial_splits(n, keys))
                << n << " sequences of " << keys << " keys, " << kv_heads << " key heads of "
                << head_dim << ", " << sms << " SMs";
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace twell::route
