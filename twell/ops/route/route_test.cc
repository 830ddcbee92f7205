// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/route/route.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace twell::route
