// SPDX-License-Identifier: Apache-2.0
// The table of how a GPU runs a feed-forward layer: for each launch, the calls it takes, what they
// cost, and what to run. Callers ask here and decide nothing themselves.
//
//   launch        shown as      tokens   GPU          norm of x in front   counts per token
//   dense rows    dense         1-8      Hopper       yes                  no
//   dense batch   dense         9-64     Hopper       no                   no
//   dense GEMMs   dense         any      any          no                   yes
//   decode rows   decode-rows   1-8      Hopper       yes                  no
//   small batch   small-batch   9-128    Hopper       no                   no
//   medium batch  tile-union    65-2048  Hopper       no                   no
//   tile-union    tile-union    any      Hopper       no                   yes
//   screened      screened      1024 on  Hopper       no                   yes
//   row-fused     row-fused     any      sm_80 on     no                   yes
//
// A policy names one or more of these; the first one of the table that takes the call runs, but
// auto takes the cheapest by estimate. So tile-union and auto run few tokens as decode rows, a
// small batch or a medium one, and a call with a norm runs a launch that computes it. Screened
// takes gated layers that have an 8-bit copy of their gate (GpuFfnLayer::screen). Plain arithmetic
// without CUDA headers: the choice depends only on its arguments, and its tests need no GPU.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "twell/format/activation.h"
#include "twell/ops/ffn/ffn.h"
#include "twell/ops/ffn/screened/rotated_screen.h"

namespace twell {

// The defaults are those of an H200.
struct GpuDevice {
  int compute_capability = 90;  // 10 * major + minor
  int64_t multiprocessors = 132;
  double clock_ghz = 1.98;     // highest clock of the SMs
  double bandwidth = 4.917e6;  // bytes per microsecond of device memory, by its clock and width
  bool operator==(const GpuDevice&) const = default;
};

struct GpuFfnLayer {
  int64_t width = 0;  // D, a multiple of 8
  int64_t ffn = 0;    // F, a multiple of 8
  bool gated = true;
  Activation activation = Activation::kRelu;
  bool biased = false;                // the projections have biases
  std::optional<ScreenBound> screen;  // of its gate's 8-bit copy, if it has one
  int64_t row_tokens = 8;  // tokens whose rows of D values fit into an SM (layer_ops::max_tokens)
  GpuDevice device;
  bool operator==(const GpuFfnLayer&) const = default;
};

struct GpuFfnCall {
  int64_t tokens = 0;  // M
  FfnPolicy policy = FfnPolicy::kAuto;
  bool norm = false;         // the RMS norm of x belongs to the call, and x may be y
  bool counts_rows = false;  // active neurons are counted per token
  bool operator==(const GpuFfnCall&) const = default;
};

// Averages over the calls so far.
struct LayerActivity {
  double nnz_per_token = -1.0;    // negative: nothing measured yet
  double union_share = -1.0;      // union of a tile of 128 tokens over F; negative: not measured
  double largest_union = -1.0;    // the largest union of a call over F; negative: not measured
  double extra_tiles = 0.0;       // tiles of heavy rows, per tile of 128 tokens
  double union_growth = 1.0;      // as below; 1: not measured
  double candidate_share = -1.0;  // like union_share, of the candidates of a screen
  bool operator==(const LayerActivity&) const = default;
};

// How unions grow with the number of tokens, 0 to 1, as measured with these averages: n tokens
// together have the union of n^growth independent ones. Captured layers have 0.7 to 0.8.
double union_growth(const LayerActivity& measured, int64_t ffn);

enum class GpuFfnLaunch {
  kDenseRows,
  kDenseBatch,
  kDenseGemms,
  kDecodeRows,
  kSmallBatch,
  kMediumBatch,
  kTileUnion,
  kScreened,
  kRowFused
};

// The layers that an execution takes. The defaults: on Hopper, of any size, with activations that
// leave zeros.
struct GpuFfnLimits {
  int least_capability = 90;  // GPUs of these compute capabilities
  int most_capability = 90;
  int64_t most_width = INT64_MAX;    // D
  int64_t most_ffn = INT64_MAX;      // F
  int64_t most_weights = INT64_MAX;  // D F
  bool zeros_only = true;            // ReLU and relu2; else any activation
};

struct GpuFfnRow {
  GpuFfnLaunch launch;
  FfnExecution execution;      // as logs and metrics name it
  bool row_fused_too = false;  // the row-fused policy names it, not only dense or tile-union
  int64_t least_tokens = 1;    // of a call
  int64_t most_tokens = INT64_MAX;
  GpuFfnLimits limits = {};
  bool rows_in_shared_memory = false;  // at most GpuFfnLayer::row_tokens tokens
  bool takes_norm = false;
  bool counts_rows = false;
  bool takes_biases = false;
  bool screened = false;                 // only layers with a screen
  int64_t most_activations = INT64_MAX;  // M F of a call
  // Estimated microseconds.
  double (*cost)(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity);
};
std::span<const GpuFfnRow> gpu_ffn_table();

// Why this launch cannot take the call, whatever the policy; empty when it can.
std::string gpu_ffn_unsupported(const GpuFfnRow& row, const GpuFfnLayer& layer,
                                const GpuFfnCall& call);

struct GpuFfnChoice {
  GpuFfnLaunch launch = GpuFfnLaunch::kDenseGemms;
  FfnExecution execution = FfnExecution::kDense;
  std::string reason;       // one line with the numbers
  double cost = 0.0;        // estimated microseconds; 0 where nothing is measured
  double dense_cost = 0.0;  // the same for the dense execution
};
// Before anything is measured, auto runs a sparse execution, which measures what dense cannot.
// Row-fused is never what auto runs on Hopper. Dense, with the reason, where no launch that the
// policy names takes the call. Error when dense does not take it either, which only happens for a
// norm where not gpu_ffn_takes_norm.
GpuFfnChoice choose_gpu_ffn(const GpuFfnLayer& layer, const GpuFfnCall& call,
                            const LayerActivity& activity);

// Whether a call of this many tokens may include the norm, under every policy.
bool gpu_ffn_takes_norm(const GpuFfnLayer& layer, int64_t tokens);

// Whether decoding one sequence is faster when it reads the gate through its 8-bit screen
// (ops/decode), which leaves out the rows of neurons that cannot fire.
bool gpu_gate_screen_pays(const GpuFfnLayer& layer, const LayerActivity& activity);

// How a batch of new tokens passes the layers of a transformer, attention included.
enum class GpuLayersPath {
  kOneKernel,   // all layers in one kernel (ops/decode)
  kFewKernels,  // five kernels per layer, which take norms, rotation and residuals along
  kSingleOps    // every op by itself
};

struct GpuLayers {
  GpuFfnLayer ffn;
  int64_t head_dim = 0;
  bool qk_norm = false;
  bool o_bias = false;            // the attention's output projection has a bias
  int64_t window = 0;             // sliding window of some layer; 0: no layer has one
  int64_t row_tokens = 8;         // like GpuFfnLayer::row_tokens, of the wider of D and heads * hd
  int64_t one_kernel_tokens = 0;  // most that one kernel of all layers takes; 0: none
  bool sparse = false;            // most layers decode a few sequences with a sparse execution
};

struct GpuBatch {
  int64_t tokens = 0;
  bool cached = false;      // keys and values go into a cache
  bool observed = false;    // results between the layers are wanted: counts per token, timings
  int64_t most_new = 0;     // tokens of a sequence
  int64_t most_keys = 0;    // of a sequence, its past included
  bool one_kernel = false;  // run one kernel however many sequences there are
};

// Most tokens that one kernel of all layers takes for such a model, given that `most` fit into the
// device; 0 where its layers do not suit that kernel.
int64_t gpu_one_kernel_tokens(const GpuLayers& layers, int64_t layer_count, int64_t most_layers,
                              int64_t most);
GpuLayersPath choose_gpu_layers(const GpuLayers& layers, const GpuBatch& batch);

// Training: a layer runs one of these forward and backward (ops/ffn_train). On the GPU:
//   execution   GPU      takes
//   dense       any      every layer
//   hybrid      Hopper   ReLU and relu2, F up to 524,288, D up to 131,072, D F below 2^35
enum class FfnTrainExecution { kDense, kHybrid };
enum class FfnTrainPolicy { kAuto, kDense, kHybrid };  // kAuto: the faster one, by estimate

// Why this execution cannot train the layer; empty when it can.
std::string gpu_ffn_train_unsupported(FfnTrainExecution execution, const GpuFfnLayer& layer);

// The execution for calls of `tokens` tokens. Dense where the policy's is not supported, and with
// kAuto before anything is measured.
FfnTrainExecution choose_gpu_ffn_train(const GpuFfnLayer& layer, int64_t tokens,
                                       FfnTrainPolicy policy, const LayerActivity& activity);

}  // namespace twell
