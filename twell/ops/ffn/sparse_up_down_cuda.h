// SPDX-License-Identifier: Apache-2.0
// The two halves of the sparse feed-forward layer on the GPU: the gate GEMM that packs its result
// into TwELL, and up and down on packed gates.
// Error on another device than stated, a D or F that is no positive multiple of 8, another TwELL
// than stated, or a call larger than its workspace. The rows of registry.h limit D and F to what
// the kernels count in 32 bits.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>
#include <string>

#include "twell/base/cuda.h"
#include "twell/format/activity_cuda.h"
#include "twell/format/byte_matrix_cuda.h"
#include "twell/format/twell.h"

namespace twell {

// Throw these errors. `portable` kernels run from compute capability 8.0 on, others on Hopper
// alone.
void check_ffn_call(const CudaContext& ctx, int64_t width, int64_t ffn, bool portable = false);
void check_packed_ffn(const CudaContext& ctx, int64_t tokens, int64_t width, int64_t ffn,
                      const TwellPacked& gate, bool portable = false);

// Gate projection with ReLU and TwELL output, on the GPU, bf16: g = relu(x w_gate^T), packed tile
// by tile in the GEMM's epilogue, so that g never exists as a matrix. Non-zeros of a (row, tile)
// are stored in an order that depends on the sizes and the device alone, not in column order. An
// overflowing tile is spilled to slot row * tiles + tile. A NaN gate counts as active.
// Deterministic. Never synchronises; can be captured in a CUDA graph.

// Progress of the gate GEMM, so that the next kernel can start on packed tiles. Device memory,
// zeroed before the GEMM starts; words[p] counts CTAs that have packed all of phase p (GatePhases).
struct GateProgress {
  static constexpr int kPhases = 4;
  int32_t* words = nullptr;  // null: not published
  int64_t size = 0;          // at least kPhases; the rest belongs to the caller
};
struct GatePhases {
  int ctas;
  int tokens[GateProgress::kPhases];  // once words[p] is `ctas`, all tokens below are packed; the
                                      // last one is M
};

// All pointers are device memory, matrices contiguous row-major, 16-byte aligned.
struct GateGemmCuda {
  int64_t tokens = 0;                     // M
  int64_t width = 0;                      // D, a multiple of 8
  int64_t ffn = 0;                        // F, a multiple of 8
  const __nv_bfloat16* x = nullptr;       // [M, D]
  const __nv_bfloat16* w_gate = nullptr;  // [F, D]
  TwellPacked out;  // shape [M, F], T = 256; spill [M * tiles, 256]; row_nnz [M], written
  const int32_t* condition = nullptr;  // device memory: if it holds 0, nothing is computed
  GateProgress progress{};             // not combined with a condition
  uint32_t cut = 0;                    // of FATReLU, see bf16_cut
  // x [M, D] and w_gate [F, D] in e4m3, in place of those in bf16; D is a multiple of 16. The
  // scales multiply the sums before ReLU. Hopper alone.
  ByteRowsCuda x_bytes, w_gate_bytes;
  bool in_bytes() const { return !x_bytes.empty(); }
};

// What the words of GateProgress mean for these sizes.
GatePhases gate_gemm_phases(const CudaContext& ctx, int64_t tokens, int64_t ffn);

void gate_gemm_cuda(CudaContext& ctx, const GateGemmCuda& problem);

// The same on mma.sync, for GPUs of compute capability 8.0 or later, with non-zeros in column
// order; without progress and condition.
void gate_gemm_sm80_cuda(CudaContext& ctx, const GateGemmCuda& problem);

// Clears counts [rows] and `words` words of progress in front of a GEMM that adds to them and is
// launched as its dependent. The GEMM may start while this kernel runs, but not before all earlier
// work is complete.
cudaError_t launch_clear_counts(int32_t* counts, int64_t rows, int32_t* progress, int64_t words,
                                cudaStream_t stream);

// Up and down on packed gates, on the GPU, bf16 with f32 accumulation, in two executions:
//   gated:      h = f(g) * (x w_up^T) on the active neurons, y = h w_down
//   non-gated:  h = f(g), y = h w_down
// g is the packed ReLU or FATReLU; f(g) is g, or g^2 for relu2. With up_relu (dReLU) the ReLU of
// the product with w_up stands in its place.
//
// Tile-union (Hopper) cuts the tokens into tiles of 128. The union of a tile's active neurons is
// compacted, and its weight rows are gathered into two small dense GEMMs on the tensor cores. Heavy
// rows, far above the mean (the first tokens of a sequence), would swell the union of every tile
// they are in, so they get tiles of their own. A tile whose union is all of F costs what the dense
// layer costs.
// Row-fused works token by token: dot product of x with a neuron's row of w_up, times g, times its
// row of w_down, added to y. It runs on any GPU of compute capability 8.0 or later, and is best
// where few neurons are active per token and neighbouring tokens share none. h is rounded to bf16
// but stays in registers. Rows with more than 64 non-zeros are spread over many warps; partial sums
// of a row are added in an order that depends on the number of such rows alone.
// Both are exact on every input and deterministic, never synchronise, and can be captured in a CUDA
// graph.

struct ScreenedFfnCuda;
namespace tile_union {
struct Tiles;
}

// All pointers are device memory, matrices contiguous row-major, 16-byte aligned.
struct SparseUpDownCuda {
  int64_t tokens = 0;                     // M
  int64_t width = 0;                      // D, a multiple of 8
  int64_t ffn = 0;                        // F, a multiple of 8
  TwellPacked gate;                       // [M, F], T = 256, any order within a tile; row_nnz set
  const __nv_bfloat16* x = nullptr;       // [M, D]; not read without a gate
  const __nv_bfloat16* w_up = nullptr;    // [F, D], or null: no gate
  const __nv_bfloat16* w_down = nullptr;  // [F, D]
  __nv_bfloat16* y = nullptr;             // [M, D], every element written; overlaps nothing
  bool add = false;                       // y += instead of =
  bool squared = false;                   // f(g) = g^2
  bool up_relu = false;
  const int32_t* y_rows = nullptr;   // [M] row of y of each row of x; null: its own
  ActivityCuda* activity = nullptr;  // added to; may be null
  // The gate comes from a gate GEMM of these sizes, directly before on this stream, which was given
  // the workspace's progress(tokens). Then this call starts while the gate GEMM runs. Gated only.
  bool follows_gate = false;
  // x [M, D] and w_up [F, D] in e4m3, in place of those in bf16; D is a multiple of 16. Gated, and
  // tile-union alone.
  ByteRowsCuda x_bytes, w_up_bytes;
  const float* y_scales = nullptr;  // [D] scales of the columns of w_down; null: none
  bool in_bytes() const { return !x_bytes.empty(); }
  bool gated() const { return w_up != nullptr || in_bytes(); }
};

// Device memory of one tile-union call in flight, for up to max_tokens tokens. The largest part is
// the compacted activations, which in the worst case are 4/3 of a dense [M, F].
class TileUnionWorkspace {
 public:
  TileUnionWorkspace(int64_t max_tokens, int64_t ffn);

  static int64_t max_tiles(int64_t tokens);
  static int64_t bytes_needed(int64_t max_tokens, int64_t ffn);  // what bytes() will be
  int64_t bytes() const;
  // For GateGemmCuda::progress of the gate GEMM before a call of `tokens` tokens.
  GateProgress progress(int64_t tokens) const;
  // Memory that is free between calls: for at least [tokens rounded up to 128, ffn rounded up to
  // 64] values, and for words.
  __nv_bfloat16* values() const { return activations_.data(); }
  uint32_t* words() const { return entries_.data(); }
  int64_t word_count() const { return entries_.size(); }

 private:
  friend void tile_union_up_down_cuda(CudaContext&, const SparseUpDownCuda&, TileUnionWorkspace&);
  friend void screened_ffn_cuda(CudaContext&, const ScreenedFfnCuda&, TileUnionWorkspace&);
  tile_union::Tiles tiles(int64_t tokens, int64_t ffn) const;
  int64_t max_tokens_;
  int64_t ffn_;
  DeviceBuffer<int32_t> tile_tokens_;        // [tiles, 128]
  DeviceBuffer<uint32_t> mask_;              // [tiles, F / 256 rounded up * 8]
  DeviceBuffer<int32_t> union_size_;         // [tiles]
  DeviceBuffer<uint32_t> before_;            // like mask_: neurons of the union below
  DeviceBuffer<int32_t> first_block_;        // [tiles]
  DeviceBuffer<uint4> heavy_;                // [tiles] a bit per row
  DeviceBuffer<int32_t> progress_;           // everything that must be 0 at the start of a call
  DeviceBuffer<uint32_t> entries_;           // [tiles, F / 256 rounded up, 2048]
  DeviceBuffer<int32_t> listed_;             // [tiles, F / 256 rounded up]
  DeviceBuffer<int32_t> union_ids_;          // [tiles, F rounded up to 64]
  DeviceBuffer<__nv_bfloat16> activations_;  // [tiles, F / 64 rounded up, 128, 64] swizzled
  DeviceBuffer<int32_t> tile_order_;         // [tiles]
};

void tile_union_up_down_cuda(CudaContext& ctx, const SparseUpDownCuda& problem,
                             TileUnionWorkspace& workspace);

// Device memory of one row-fused call in flight, for up to max_tokens tokens of up to max_width.
class RowFusedWorkspace {
 public:
  // Synchronises once, to clear its counters.
  RowFusedWorkspace(CudaContext& ctx, int64_t max_tokens, int64_t max_width);

  int64_t bytes() const { return heavy_rows_.bytes() + counters_.bytes() + partials_.bytes(); }

 private:
  friend void row_fused_up_down_cuda(CudaContext&, const SparseUpDownCuda&, RowFusedWorkspace&);
  int64_t max_tokens_;
  int64_t max_width_;
  DeviceBuffer<int32_t> heavy_rows_;  // [M]
  DeviceBuffer<int32_t> counters_;    // heavy rows, CTAs done, parts done of each split row
  DeviceBuffer<float> partials_;      // [parts of split rows, D]
};

void row_fused_up_down_cuda(CudaContext& ctx, const SparseUpDownCuda& problem,
                            RowFusedWorkspace& workspace);

}  // namespace twell

// Buffers and launches of the tile-union kernels, which run in this order on one stream:
//   find_unions  cuts tokens into tiles; heavy rows go to tiles of their own. Per tile: union of
//                active neurons, list of non-zeros; work lists of the two GEMMs
//   up           activations = gate * (x w_up[union]^T), on the union
//   down         y = activations w_down[union]
// Each takes a tile as soon as its predecessor, from the gate GEMM on, has finished it.
//
// Without a gate, and in training, place_gates follows find_unions and writes the compacted gate to
// activations. Then up computes products alone, and down computes the sum of two products where
// backward needs it.
namespace twell::tile_union {

inline constexpr int kTileTokens = 128;  // two warpgroups of 64 rows
inline constexpr int kBlock = 64;        // neurons per block: 128 bytes, the widest swizzle
// A work item of up has at most 192 neurons. 256 would halve the traffic of x, but leave shared
// memory for three stages only; four stages are faster (docs/kernels.md).
inline constexpr int kMaxChunkBlocks = 3;
inline constexpr int kGateUpBlocks = 2;  // of an item that also computes the gate
// Where there are few tiles, items are smaller, so that there are about as many as SMs.
inline constexpr int kSpreadItems = 128;
inline constexpr int kColumns = 256;  // columns of y per work item of down

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

}  // namespace twell::tile_union
