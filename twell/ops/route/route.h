// SPDX-License-Identifier: Apache-2.0
// Every choice of a kernel that is not the FFN's (ops/ffn/registry.h): plain host arithmetic on
// numbers, with tests that need no GPU. No other file holds a number of tokens that decides which
// kernel runs.
#pragma once

#include <compare>
#include <cstdint>

#include "twell/format/kv_blocks.h"

namespace twell::route {

// --- The layers of a transformer ---

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
  int64_t stream_tokens = 0;  // fewest that most layers stream rows for, see stream_pays; 0: none
  bool in_bytes = false;      // projections in e4m3, which few kernels per layer do not take
};

struct Batch {
  int64_t tokens = 0;
  bool cached = false;      // keys and values go into a cache
  bool observed = false;    // results between the layers are wanted: counts per token, timings
  int64_t most_new = 0;     // tokens of a sequence
  int64_t most_keys = 0;    // of a sequence, its past included
  bool one_kernel = false;  // run one kernel however many sequences there are
  // Some sequence has several of the tokens, each of which is staged as one of its own: they attend
  // to keys that the kernel of all layers would still be writing.
  bool repeats = false;
};

// Most tokens that one kernel of all layers takes for such a model, given that `most` fit into the
// device; 0 where its layers do not suit that kernel.
int64_t one_kernel_tokens(const Layers& layers, int64_t layer_count, int64_t most_layers,
                          int64_t most);
LayersPath layers_path(const Layers& layers, const Batch& batch);

// The number of tokens for which a model counts as sparse (Layers::sparse): about where one kernel
// and few kernels are equally fast.
inline constexpr int64_t kSparseProbeTokens = 4;

// Whether a layer of few kernels that streams rows (row-stream) is faster than one kernel of all
// layers, which reads them as decode rows do. In microseconds; `screened`: one kernel would read
// the gate through a screen. layer_bytes as below.
bool stream_pays(double decode_rows_us, double row_stream_us, bool screened, int64_t tokens,
                 int64_t layer_bytes);
inline constexpr int64_t kMostStreamProbed = 3;  // tokens; more take few kernels anyway

// Stages of weights that a CTA of the kernel of all layers requests before earlier ones are there,
// in sparse layers (DecodeLayers::sparse_requests). layer_bytes: of a layer's projections of the
// attention and of the FFN's first matrix, which all are read.
int sparse_requests(int64_t layer_bytes);

// Whether, in a layer of few kernels, a norm of its own and the products of batch_ops.h are faster
// than those of layer_ops.h, which take the norm along. Asked where batch_ops.h takes the heads.
bool norm_apart(int64_t tokens);

// Whether feed-forward layers that work with unions take the tokens of a batch sorted by id, which
// makes unions smaller. dense: no layer does.
bool sorts_rows_by_id(int64_t tokens, bool dense);

// Whether decoding one sequence is faster when it reads the gate through its 8-bit screen
// (ops/decode), which leaves out the rows of neurons that cannot fire.
bool gate_screen_pays(double nnz_per_token, int64_t ffn);

// --- Products ---

inline constexpr int64_t kSkinnyRows = 8;  // most tokens of layer_ops.h
inline constexpr int64_t kBatchRows = 64;  // and of batch_ops.h
inline constexpr int64_t kRowStep = 128;   // GEMMs of more tokens have a multiple of so many rows

struct Device {
  bool hopper = true;
  int64_t multiprocessors = 132;
};

enum class LinearKernel {
  kSkinny,  // ops/skinny/layer_ops.h
  kBatch,   // ops/skinny/batch_ops.h
  kGemm     // cuBLASLt
};
// y [rows, cols] = x w^T. row_tokens: rows of x that fit into an SM (layer_ops::row_tokens).
LinearKernel linear_kernel(const Device& device, int64_t rows, int64_t cols, int64_t row_tokens);

// How many rows the GEMMs of a batch have, so that few different shapes need plans.
int64_t padded_rows(int64_t tokens);

// Whether q, k and v with their rotation are faster as one kernel of 256 x 256 tiles than as a
// product and a rotation.
bool fused_qkv_pays(int64_t tokens);

// Which of cuBLASLt's proposals a product of so many rows prefers to the first
// (matmul_cuda.cc says how): what was measured on an H200.
struct GemmRules {
  bool proven_tiles = false;   // medium tiles, else large ones, and nothing else counts
  bool follows_rules = false;  // any of the below
  bool medium_tiles = false;   // in place of slow larger ones
  bool full_wave = false;      // in place of split or widely clustered ones
  bool few_clusters_of_four = false;
};
GemmRules gemm_rules(int64_t rows);

// Whether a product is like those whose proposals were compared bit for bit
// (bench/results/2026-11-23-matmul-in-use.txt). Of smaller and ragged ones nothing is known.
bool gemm_bits_known(int64_t rows, int64_t cols, int64_t inner, bool trans_a);

// --- Attention ---

enum class AttentionKernel {
  kDecode,  // a query per sequence over a paged cache
  kOther    // cuDNN where it takes the shape, else the tiled kernel
};
AttentionKernel attention_kernel(int64_t max_q_len, bool paged);
// Whether prompts of a ragged batch are long enough for cuDNN.
bool ragged_attention_pays(int64_t max_q_len);

// How decoding cuts a sequence's keys.
inline constexpr int kMostQueries = 8;  // of a CTA
inline constexpr int kLeastKeys =
    256;  // of a split: with fewer, combining costs as much as a split
inline constexpr int kMostKeys = 32 * kKvBlock;  // a warp holds the blocks of a split
inline constexpr int kWarpsPerSm = 16;           // wanted

// A sequence's keys are divided into up to `splits` splits of equal lengths, fewer for short texts.
// `warps` warps of one CTA share a split. With a key head for each query head, in bf16, a lane has
// `loads` loads of keys, and as many of values, on the way: 8, or 4 if warps is 1.
struct AttentionDivision {
  int64_t splits = 0;
  int warps = 0;
  int loads = 8;
  auto operator<=>(const AttentionDivision&) const = default;
};
struct AttentionHeads {
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  bool eight_bits = false;  // keys and values
};
// CTAs of a sequence's split.
int64_t attention_ctas(const AttentionHeads& heads);
// Divides the keys of sequences of up to max_kv_len keys each. It does not depend on their lengths,
// so that a captured graph serves all lengths.
AttentionDivision attention_division(const AttentionHeads& heads, int64_t sequences,
                                     int64_t max_kv_len, int64_t multiprocessors);
// Splits that a sequence of so many keys needs.
int64_t attention_fewest_splits(int64_t max_kv_len);
// Splits of all sequences together, at most, in those divisions of 1 to max_sequences sequences
// that have more than one of each. Small batches divide keys that large ones leave whole.
int64_t attention_partial_splits(int64_t max_sequences, int64_t max_kv_len);
// Warps of a CTA for whose results shared memory has room.
constexpr int attention_most_warps(int64_t head_dim) { return head_dim <= 128 ? 8 : 4; }

}  // namespace twell::route
