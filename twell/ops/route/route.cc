// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/route/route.h"

namespace twell::route {
namespace {

// The most sequences that one kernel of all layers decodes faster than a few kernels per layer do.
// 2b with four makes 2,215 tokens/s dense and 2,703 sparse by one, 2,071 and 2,816 by these.
int64_t one_kernel_pays(bool sparse) { return sparse ? 3 : 4; }

// Reading through a screen is faster up to this share of active neurons.
constexpr double kScreenedShare = 1.0 / 80.0;

}  // namespace

int64_t one_kernel_tokens(const Layers& layers, int64_t layer_count, int64_t most_layers,
                          int64_t most) {
  const bool suits = layers.relu && !layers.qk_norm && !layers.o_bias && !layers.biased &&
                     layer_count <= most_layers;
  return suits ? most : 0;
}

LayersPath layers_path(const Layers& layers, const Batch& batch) {
  if (batch.observed || !batch.cached) return LayersPath::kSingleOps;
  // The kernel of all layers attends to all keys.
  const bool slides = layers.window > 0 && batch.most_keys > layers.window;
  const bool few = batch.tokens >= 1 && batch.tokens <= layers.norm_tokens &&
                   layers.head_dim % 16 == 0 && !layers.qk_norm && !layers.o_bias;
  if (batch.most_new == 1 && batch.tokens <= layers.one_kernel_tokens && !slides) {
    const bool pays = batch.tokens <= one_kernel_pays(layers.sparse) || !few;
    if (pays || batch.one_kernel) return LayersPath::kOneKernel;
  }
  return few ? LayersPath::kFewKernels : LayersPath::kSingleOps;
}

bool gate_screen_pays(double nnz_per_token, int64_t ffn) {
  return nnz_per_token <= kScreenedShare * static_cast<double>(ffn);
}

}  // namespace twell::route
