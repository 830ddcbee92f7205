// SPDX-License-Identifier: Apache-2.0
// Internal to ffn_train: the objects behind ffn_train_cuda.h, each of which owns one block of
// device memory, which its execution lays out; the two executions; and the kernels of the hybrid
// one with the data they hand to each other. All pointers of kernels are device memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "twell/base/carver.h"
#include "twell/format/activity_cuda.h"
#include "twell/ops/ffn/sparse_up_down_cuda.h"
#include "twell/ops/ffn_train/ffn_train_cuda.h"

namespace twell {

namespace ffn_train {

// What the hybrid execution has room to keep of one chunk of tokens.
struct HybridCapacity {
  int64_t pairs = 0;   // active (token, neuron) pairs
  int64_t blocks = 0;  // of 64 neurons of tiles' unions
};

}  // namespace ffn_train

struct FfnSavedCuda::Parts {
  FfnTrainShapeCuda shape;
  FfnTrainExecution execution = FfnTrainExecution::kDense;
  ffn_train::HybridCapacity capacity;
  int64_t tokens = 0;           // of the forward whose activations are saved, or 0
  TwellPacked replay;           // of that forward
  std::byte* memory = nullptr;  // of `owned`, or the caller's
  DeviceBuffer<std::byte> owned;
};

struct FfnTrainWorkspaceCuda::Parts {
  FfnTrainShapeCuda shape;
  bool hybrid = false;  // has room for the hybrid execution
  int64_t bytes = 0;
  std::byte* memory = nullptr;  // of `owned`, or the caller's
  DeviceBuffer<std::byte> owned;
};

namespace ffn_train {

// Arrays of a block of device memory, aligned as cudaMalloc aligns.
inline Carver device_carver(std::byte* block = nullptr) { return {block, 256}; }

// Sizes in bytes.
int64_t dense_saved_bytes(const FfnTrainShapeCuda& shape);
int64_t dense_workspace_bytes(const FfnTrainShapeCuda& shape);
int64_t hybrid_saved_bytes(const FfnTrainShapeCuda& shape, HybridCapacity capacity);
int64_t hybrid_workspace_bytes(const FfnTrainShapeCuda& shape);

// What to make room for: what nnz per token and union_neurons per tile of tokens (negative: not
// known) let expect, as far as the size of the dense execution's memory allows.
HybridCapacity hybrid_capacity(const FfnTrainShapeCuda& shape, double nnz, double union_neurons);

void dense_forward_cuda(CudaContext& ctx, const FfnTrainForwardCuda& problem,
                        FfnSavedCuda::Parts& saved, FfnTrainWorkspaceCuda::Parts& workspace);
void dense_backward_cuda(CudaContext& ctx, const FfnTrainBackwardCuda& problem,
                         FfnSavedCuda::Parts& saved, FfnTrainWorkspaceCuda::Parts& workspace);
void hybrid_forward_cuda(CudaContext& ctx, const FfnTrainForwardCuda& problem,
                         FfnSavedCuda::Parts& saved, FfnTrainWorkspaceCuda::Parts& workspace);
void hybrid_backward_cuda(CudaContext& ctx, const FfnTrainBackwardCuda& problem,
                          FfnSavedCuda::Parts& saved, FfnTrainWorkspaceCuda::Parts& workspace);

}  // namespace ffn_train
}  // namespace twell

// The hybrid execution. Per chunk of tokens, beside the kernels of unions
// (ops/ffn/sparse_up_down_cuda.h):
//   forward   gate GEMM, find_unions, place_gates; up: u on the unions; keep; down
//   backward  up with d_y and w_down: d_h on the unions; expand; down with two products: d_x;
//             then by neuron: rank, neuron_unions, transpose, weight_grads
// An image is bf16 values of 128 rows by 64 columns per block, as WGMMA reads them: row-major, each
// row's eight pieces of 16 bytes permuted by XOR with row % 8.
namespace twell::ffn_train {

// --- Tiles of tokens ---

using tile_union::Tiles;

// Index in an image's block of the value of a row and a column.
__device__ __forceinline__ int value_index(int row, int column) {
  return row * tile_union::kBlock + ((column / 8) ^ (row % 8)) * 8 + column % 8;
}

// Tokens per chunk. The memory of the images is proportional to it, because it must be enough for
// any pattern. Smaller chunks would read and write the weight gradients more often.
inline constexpr int kChunkTokens = 16384;
inline constexpr int kMaxChunkTiles =
    kChunkTokens / tile_union::kTileTokens +
    (kChunkTokens / tile_union::kHeavyFactor + tile_union::kTileTokens - 1) /
        tile_union::kTileTokens;
inline constexpr int kNeuronTile = 128;  // neurons

// State of one chunk. All 0 before forward.
struct KeptState {
  unsigned long long used;  // values, including those that did not fit
  ActivityCuda activity;
  uint32_t ticket;               // CTAs of keep that have finished
  int32_t overflow;              // 1: something did not fit, and backward computes g and u again
  int32_t up_taken, down_taken;  // queue counters of the GEMMs up and down
};

// What forward keeps of a chunk's activations for backward. Its tiles are kept too, but not their
// images.
struct Kept {
  uint32_t* values;   // [capacity] g | u << 16 of active pairs, by block, neuron, token
  uint4* masks;       // [block_capacity, kBlock] per neuron, a bit for each token it is active on
  uint32_t* offsets;  // [block_capacity] index of a block's first value
  KeptState* state;
  int64_t capacity;
  int block_capacity;
};

// h = f(g) * u in place of g; keeps g and u of active pairs; counts.
struct Keep {
  Tiles tiles;             // activations: image of g in, of h out
  const __nv_bfloat16* u;  // image, or null: no gate
  Kept kept;
  double* l1_parts;            // [blocks]
  FfnTrainCountsCuda* counts;  // added to, or null
  uint8_t* active;             // [F], or null
  bool squared;                // relu2: f(g) = g^2
};
cudaError_t launch_keep(const Keep& keep, int ctas, cudaStream_t stream);

// From d_h and what was kept: d_g, d_u and h as images on the unions, exactly 0 where a neuron is
// not active. Where the chunk overflowed, g and u come from images instead.
struct Expand {
  Tiles tiles;         // activations: image of h out; of g in, where the chunk overflowed
  __nv_bfloat16* d_u;  // image out, null without a gate; of u in, where the chunk overflowed
  __nv_bfloat16* d_g;  // image out; of d_h in
  Kept kept;
  uint4* masks;           // [blocks, kBlock] written where the chunk overflowed
  int32_t* neuron_nnz;    // [F] added to
  const float* l1_scale;  // one value
  bool squared;           // relu2
};
cudaError_t launch_expand(const Expand& expand, int ctas, cudaStream_t stream);

// --- Tiles of neurons ---

// Weight gradients are sums over tokens, so here 128 neurons make a tile, which gathers the tokens
// that any of them is active on. Neurons that fire about equally often share a tile.
struct NeuronCounts {
  int32_t tiles;
  int32_t blocks;      // of all tiles
  int32_t items;       // of weight_grads
  int32_t arrived;     // CTAs of neuron_unions that have finished
  int32_t transposed;  // blocks that CTAs of transpose have taken
  // Queue counters of weight_grads, of the product d_y w_down^T, of u when it is computed again,
  // and of d_x.
  int32_t taken, up_taken, again_taken, down_taken;
};
struct NeuronTiles {
  // Must be 0 before backward:
  int32_t* nnz;    // [F] tokens that a neuron is active on
  int32_t* size;   // [tiles] tokens that any neuron of the tile is active on
  int32_t* turns;  // [tiles, products * columns, 2] pieces added so far
  NeuronCounts* counts;
  // Written by backward:
  int32_t* order;        // [tiles, kNeuronTile] neuron, or -1
  uint32_t* mask;        // [tiles, words] a bit per slot of the token tiles
  int32_t* positions;    // [tiles, words / 4, kNeuronTile] a neuron's position in the union of a
                         // token tile, counted from the first block of all; or -1
  int32_t* first_block;  // [tiles]
  int32_t* ids;          // [blocks, kBlock] token, or -1
  __nv_bfloat16* images[3];  // by product: [blocks, kNeuronTile, kBlock]
  int4* entries;             // {first block, blocks, tile, 2 * piece + (1: more pieces follow)}
  int ffn;                   // F
  int max_tiles;             // F / kNeuronTile rounded up
  int words;                 // 4 per token tile
  int products;              // 3, or 2 without a gate
  int columns;               // D / 256 rounded up
};
cudaError_t launch_rank_neurons(const NeuronTiles& neurons, cudaStream_t stream);

struct Transpose {
  Tiles tiles;
  Kept kept;
  const uint4* masks;              // those of expand
  const __nv_bfloat16* images[3];  // by product, images on the token tiles
  NeuronTiles neurons;
};
// Which tokens each tile of neurons needs, and the items of weight_grads, whose grid has `ctas`
// CTAs.
cudaError_t launch_neuron_unions(const Transpose& transpose, int ctas, cudaStream_t stream);
cudaError_t launch_transpose(const Transpose& transpose, int ctas, cudaStream_t stream);

// grads[p] [F, D] += images[p] right[p]. The pieces of a sum are added in their order.
struct WeightGrads {
  NeuronTiles neurons;
  const __nv_bfloat16* right[3];  // [M, D]
  float* grads[3];                // [F, D]
  int width;                      // D
  bool add;                       // false: = instead of +=, for neurons that fire
};
// Sets the gradients of neurons that do not fire to 0.
cudaError_t launch_clear_idle(const WeightGrads& grads, cudaStream_t stream);
cudaError_t launch_weight_grads_sm90(const WeightGrads& grads, int ctas, cudaStream_t stream);

}  // namespace twell::ffn_train
