// SPDX-License-Identifier: Apache-2.0
// Data that the kernels of the tile-union execution hand to each other, and their launches. They
// run in this order on one stream:
//   split_rows    which tokens make which tile; heavy rows go to tiles of their own
//   build_unions  per tile: union of active neurons, and the activations compacted onto it; work
//                 lists for the two GEMMs
//   up            activations *= x w_up[union]^T, in place (gated layers only)
//   down          y = activations w_down[union]
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/format/activity_cuda.h"

namespace twell::tile_union {

inline constexpr int kTileTokens = 128;  // two warpgroups of 64 rows
inline constexpr int kBlock = 64;        // neurons per block: 128 bytes, the widest swizzle
// An up item: at most 192 neurons. 256 would halve the traffic of x, but leaves
// shared memory for three stages only, and a fourth one measured better (docs/kernels.md).
inline constexpr int kMaxChunkBlocks = 3;
inline constexpr int kColumns = 256;  // columns of y per down item

// A row is heavy when it has over kHeavyFloor non-zeros and over kHeavyFactor times the mean. So
// less than 1 / kHeavyFactor of the rows are heavy, which bounds the number of extra tiles.
inline constexpr int kHeavyFactor = 3;
inline constexpr int kHeavyFloor = 64;

// Beyond, the mask of a union does not fit into build_unions' shared memory.
inline constexpr int kMaxFfn = 524288;

struct Counts {
  int32_t tiles;
  int32_t plain_tiles;  // those before the heavy ones: 128 consecutive rows each
  int32_t sized;        // tiles whose union's size is known
  int32_t up_items;
  int32_t up_taken;  // items handed out beyond one per CTA
  int32_t down_taken;
};

// The gate's TwELL with its derived sizes, which a kernel would otherwise divide for.
struct Gate {
  const uint32_t* words;   // [M, col_tiles, slots]
  const uint4* spill;      // [spill slots, 32] eight bf16 each
  const int32_t* row_nnz;  // [M]
  int rows;                // M
  int col_tiles;
  int slots;  // words per (row, tile)
};

struct Tiles {
  int32_t* tokens;             // [tiles, kTileTokens] row of x and y, or -1
  uint32_t* mask;              // [tiles, column tiles * 8] the union, a bit per neuron
  int32_t* union_size;         // [tiles]
  int32_t* union_ids;          // [tiles, blocks * kBlock] neurons, ascending
  __nv_bfloat16* activations;  // [tiles, blocks, kTileTokens, kBlock], 16-byte pieces of a row
                               // XORed with row % 8: the image WGMMA reads
  int32_t* order;              // [tiles] by falling union size
  int2* up_items;              // {tile, first block | blocks << 16}
  Counts* counts;
  int blocks;  // ceil(F / kBlock)
  int max_tiles;
};

struct Gemm {
  CUtensorMap map_x;  // of x, boxes of kTileTokens rows; not for down
  Tiles tiles;
  const __nv_bfloat16* x;       // [M, D]
  const __nv_bfloat16* weight;  // [F, D] w_up or w_down
  __nv_bfloat16* y;             // [M, D]
  int width;                    // D
};

// Both add to activity what they see, unless it is null.
cudaError_t launch_split_rows(const Gate& gate, const Tiles& tiles, ActivityCuda* activity,
                              cudaStream_t stream);
// ctas: what launch_up_sm90 will be given, one per multiprocessor.
cudaError_t launch_build_unions(const Gate& gate, const Tiles& tiles, ActivityCuda* activity,
                                int ctas, cudaStream_t stream);
cudaError_t launch_up_sm90(const Gemm& gemm, int ctas, cudaStream_t stream);
cudaError_t launch_down_sm90(const Gemm& gemm, int ctas, cudaStream_t stream);

}  // namespace twell::tile_union
