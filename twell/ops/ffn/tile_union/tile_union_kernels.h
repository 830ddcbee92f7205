// SPDX-License-Identifier: Apache-2.0
// Buffers and launches of the tile-union kernels, of which screened layers and training are made
// too. They run in this order on one stream:
//   find_unions  cuts tokens into tiles; heavy rows go to tiles of their own. Per tile: union of
//                active neurons, list of non-zeros; work lists of the two GEMMs
//   up           activations = gate * (x w_up[union]^T), on the union
//   down         y = activations w_down[union]
// Each takes a tile as soon as its predecessor, from the gate GEMM on, has finished it.
//
// Without a gate, and in training, place_gates follows find_unions and writes the compacted gate to
// activations. Then up computes products alone, and down computes the sum of two products where
// backward needs it.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "twell/format/activity_cuda.h"
#include "twell/format/byte_matrix_cuda.h"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"

namespace twell::tile_union {

inline constexpr int kTileTokens = 128;  // two warpgroups of 64 rows
inline constexpr int kBlock = 64;        // neurons per block: 128 bytes, the widest swizzle
// A work item of up has at most 192 neurons. 256 would halve the traffic of x, but leave shared
// memory for three stages only; four stages are faster (docs/kernels.md).
inline constexpr int kMaxChunkBlocks = 3;
inline constexpr int kGateUpBlocks = 2;    // of an item that also computes the gate
inline constexpr int kPortableBlocks = 4;  // of an item of the portable kernel
// Where there are few tiles, items are smaller, so that there are about as many as SMs.
inline constexpr int kSpreadItems = 128;
inline constexpr int kColumns = 256;  // columns of y per work item of down

// A block of activations in e4m3, in the layout WGMMA reads: rows of 64 bytes, whose 16-byte piece
// i is at i XOR (row / 2) % 4; of every 16 neurons, which are a piece, in the order 0 1 8 9, 2 3 10
// 11, 4 5 12 13, 6 7 14 15. Behind the values comes an int8 per token: h = value * 2^exponent.
struct ByteBlock {
  static constexpr uint32_t kValues = kTileTokens * kBlock;
  static constexpr uint32_t kBytes = kValues + kTileTokens;
  static constexpr int kNoExponent = -128;  // all values are 0

#ifdef __CUDACC__
  // The smallest exponent with which e4m3, at most 448, holds values up to `largest`: at most 120.
  // 127 where that is infinite. Its inverse is 0 in f32, so that infinite values become NaN, and
  // with them all of their token's y, as in a dense layer.
  __device__ __forceinline__ static int exponent_of(float largest) {
    if (largest == 0.0f) return kNoExponent;
    // 2^exponent is largest / 448 with its mantissa rounded up.
    const int exponent = ((__float_as_int(largest * (1.0f / 448.0f)) + 0x7fffff) >> 23) - 127;
    return min(max(exponent, -126), 127);
  }
#endif
};

// A row is heavy when it has over kHeavyFloor non-zeros and over kHeavyFactor times the mean of the
// 128 rows of its tile. So less than 1 / kHeavyFactor of the rows are heavy, which bounds the
// number of extra tiles.
inline constexpr int kHeavyFactor = 3;
inline constexpr int kHeavyFloor = 64;

// Non-zeros of 128 tokens by 256 neurons that find_unions lists, so that up need not read the gate.
inline constexpr int kListed = 2048;

// With a larger F the mask of a union does not fit into the shared memory of place_gates.
inline constexpr int kMaxFfn = 524288;

struct Counts {
  int32_t tiles;
  int32_t plain_tiles;  // tiles before the heavy ones: 128 consecutive rows each
  int32_t sized;        // tiles whose union's size is known
  int32_t up_items;     // items of up added before `complete`; without `entries`, all items
  int32_t up_taken;     // counter for Up::taken
  int32_t down_taken;
  // For find_unions:
  int32_t judged;       // plain tiles whose heavy rows are known
  int32_t heavy_tiles;  // valid once all plain tiles are judged
  int32_t heavy_taken;  // parts of heavy tiles that CTAs have taken
  int32_t complete;     // not 0: tiles, up_items and order are complete
};

// The gate's TwELL with derived sizes, which save divisions in kernels.
struct Gate {
  const uint32_t* words;   // [M, col_tiles, slots]
  const uint4* spill;      // [spill slots, 32] eight bf16 each
  const int32_t* row_nnz;  // [M]
  int rows;                // M
  int col_tiles;
  int slots;  // words per (row, tile)
  // For find_unions: GateProgress::words of the preceding gate GEMM and their meaning. Null: the
  // gate is complete when the predecessor is.
  const int32_t* packed = nullptr;
  GatePhases phases = {};
  bool squared = false;  // place_gates and up take g^2 for g
  bool up_relu = false;  // up takes the ReLU of its product
  uint32_t cut = 0;      // of FATReLU, where up computes the gate too
  // CandidatesCuda::words of a screen, in place of `words` and `spill`; row_nnz counts candidates.
  const uint32_t* candidates = nullptr;
};

struct Tiles {
  int32_t* tokens;       // [tiles, kTileTokens] row of x and y, or -1
  uint32_t* mask;        // [tiles, column tiles * 8] the union, a bit per neuron
  int32_t* union_size;   // [tiles]
  int32_t* first_block;  // [tiles] where a tile's blocks begin: `blocks` after those of the tile
                         // before it, or without `entries` right after its last one
  uint32_t* before;      // [tiles, column tiles * 8] neurons of the union in words of the mask
                         // below
  uint4* heavy;          // [plain tiles] of find_unions alone: a bit per row that is heavy
  int32_t* marked;       // [tiles] of find_unions alone: parts that are done, then whether up has
                         // items; 0 at the start
  // For up with a gate, else null:
  uint32_t* entries;   // [tiles, column tiles, kListed] the non-zeros, in any order: column % 256 |
                       // slot in the tile << 8 | bf16 bits << 16
  int32_t* listed;     // [tiles, column tiles] how many; none are listed where it is over kListed
  int32_t* ready;      // [tiles] blocks of activations that up has written, each in two halves; 0
                       // at the start
  int32_t* union_ids;  // [first block of tile, blocks * kBlock] neurons, ascending
  __nv_bfloat16* activations;  // [first block of tile, blocks, kTileTokens, kBlock], 16-byte pieces
                               // of a row XORed with row % 8: the image WGMMA reads
  int32_t* order;              // [tiles] by falling union size
  int2* up_items;              // {tile, first block | blocks << 16}; of find_unions, which adds
                               // them as it finds unions, 0 at the start
  Counts* counts;
  int blocks;  // ceil(F / kBlock)
  int max_tiles;
  int max_up_items;
  int spread;  // items of up that a tile's union is cut into at least, if it has as many blocks
  int chunk_blocks = kMaxChunkBlocks;  // of an item of up, at most
};

// Device memory: the kernel runs only if it holds a value other than 0. Null: it runs.
using Condition = const int32_t*;

struct Up {
  CUtensorMap map_x;  // of x, boxes of kTileTokens rows
  Tiles tiles;
  Gate gate;                    // not read when `product` is set
  const __nv_bfloat16* x;       // [M, D]
  const __nv_bfloat16* weight;  // [F, D]
  __nv_bfloat16*
      product;     // like activations: x weight[union]^T alone; null: gate * that to activations
  int32_t* taken;  // counter of items taken beyond one per CTA, 0 at the start
  int width;       // D
  Condition condition;
  // [F, D]: the gate is relu(x gate_weight[union]^T), computed here; null: it comes from `gate`.
  const __nv_bfloat16* gate_weight;
  ActivityCuda* activity;  // with gate_weight: pairs that fire are added to nnz; may be null
  int32_t* row_nnz;        // [M] with gate_weight: they are added for each token; may be null
  // x and weight in e4m3, in place of those in bf16; with a gate that comes from `gate`.
  ByteRowsCuda x_bytes, weight_bytes;
};

struct Down {
  Tiles tiles;
  const __nv_bfloat16* weight;  // [F, D]
  // A second product to add: activations2 weight2[union]; null: none.
  const __nv_bfloat16* activations2;
  const __nv_bfloat16* weight2;
  __nv_bfloat16* y;                 // [M, D]
  int32_t* taken;                   // like Up::taken
  int width;                        // D
  bool add;                         // y += instead of =, both rounded to bf16
  const int32_t* y_rows = nullptr;  // [M] row of y of each token; null: its own
  const float* y_scales = nullptr;  // [D] of columns of the weight; null: none
  // [F, D] in e4m3, in place of `weight`; then activations are ByteBlocks.
  const uint8_t* weight_bytes = nullptr;
};

// find_unions adds to activity what it counts, unless it is null. When it does not follow the gate
// GEMM tile by tile, it first clears `progress_words` words of `progress`, which hold everything
// that must be 0 at the start; callers that clear it themselves pass no words. ctas: one per SM.
cudaError_t launch_find_unions(const Gate& gate, const Tiles& tiles, ActivityCuda* activity,
                               int32_t* progress, int64_t progress_words, int ctas,
                               cudaStream_t stream);
// place_gates writes union_ids and activations of unions that find_unions found without `entries`,
// also of those from an earlier call. ctas: one per SM.
cudaError_t launch_place_gates(const Gate& gate, const Tiles& tiles, int ctas, cudaStream_t stream,
                               Condition condition = nullptr);
cudaError_t launch_up_sm90(const Up& up, int ctas, cudaStream_t stream);
cudaError_t launch_down_sm90(const Down& down, int ctas, cudaStream_t stream);
// With weight_bytes and y_scales.
cudaError_t launch_byte_down_sm90(const Down& down, int ctas, cudaStream_t stream);
// For compute capability 8.0 and later, behind find_unions without `entries` and place_gates, whose
// activations are the gate that up multiplies with; not in e4m3. Items of up have at most
// kPortableBlocks blocks.
cudaError_t launch_up_sm80(const Up& up, int ctas, cudaStream_t stream);
cudaError_t launch_down_sm80(const Down& down, int ctas, cudaStream_t stream);

}  // namespace twell::tile_union
