// SPDX-License-Identifier: Apache-2.0
// Every choice of a kernel that is not the FFN's (ops/ffn/registry.h): plain host arithmetic on
// numbers, with tests that need no GPU. No other file holds a number of tokens that decides which
// kernel runs.
#pragma once

#include <cstdint>

namespace twell::route {

// How a batch of new tokens passes the layers of a transformer, attention included.
enum class LayersPath {
  kOneKernel,   // all layers in one kernel (ops/decode)
  kFewKernels,  // five kernels per layer, which take norms, rotation and residuals along
  kSingleOps    // every op by itself
};

struct Layers {
  int64_t head_dim = 0;
  bool relu = true;     // the FFN's activation is ReLU itself
  bool biased = false;  // the FFN has biases
  bool qk_norm = false;
  bool o_bias = false;            // the attention's output projection has a bias
  int64_t window = 0;             // sliding window of some layer; 0: no layer has one
  int64_t norm_tokens = 0;        // most whose norms the products of a layer take along
  int64_t one_kernel_tokens = 0;  // most that one kernel of all layers takes; 0: none
  bool sparse = false;            // most layers decode a few sequences with a sparse execution
};

struct Batch {
  int64_t tokens = 0;
  bool cached = false;      // keys and values go into a cache
  bool observed = false;    // results between the layers are wanted: counts per token, timings
  int64_t most_new = 0;     // tokens of a sequence
  int64_t most_keys = 0;    // of a sequence, its past included
  bool one_kernel = false;  // run one kernel however many sequences there are
};

// Most tokens that one kernel of all layers takes for such a model, given that `most` fit into the
// device; 0 where its layers do not suit that kernel.
int64_t one_kernel_tokens(const Layers& layers, int64_t layer_count, int64_t most_layers,
                          int64_t most);
LayersPath layers_path(const Layers& layers, const Batch& batch);

// The number of tokens for which a model counts as sparse (Layers::sparse): about where one kernel
// and few kernels are equally fast.
inline constexpr int64_t kSparseProbeTokens = 4;

// Whether decoding one sequence is faster when it reads the gate through its 8-bit screen
// (ops/decode), which leaves out the rows of neurons that cannot fire.
bool gate_screen_pays(double nnz_per_token, int64_t ffn);

}  // namespace twell::route
