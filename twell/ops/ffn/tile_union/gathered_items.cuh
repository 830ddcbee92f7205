// SPDX-License-Identifier: Apache-2.0
// The work items of GEMMs that gather the rows of their right operand, as the kernels for Hopper
// (gathered_gemm_sm90.cuh) and the portable ones (gathered_gemm_sm80.cuh) compute them: out [128,
// 256] = sum over k of A[k] [128, 64] B[ids[k]] [64, 256 columns].
#pragma once

#include <cstdint>

#include "twell/ops/ffn/tile_union/tile_union_kernels.h"

namespace twell::tile_union::gathered {

inline constexpr uint32_t kBytesA = kTileTokens * kBlock * 2;

// One or two sums over the same ids, accumulated one after the other.
struct Operands {
  const uint8_t* a[2];  // [blocks] of kBytesA, images as of Tiles::activations
  const uint4* b[2];    // rows of `width` bf16
  const int32_t* ids;   // rows of B
  int positions;        // number of ids; negative ids and those past the end contribute 0
  int blocks;           // of 64 ids
  int passes;           // 1 or 2
  int column;           // first of 256
  // For a problem that overlaps its predecessor: A may be read once *ready is at least `until`.
  const int32_t* ready = nullptr;
  int until = 0;

  __device__ __forceinline__ int k_steps() const { return blocks * passes; }
};

}  // namespace twell::tile_union::gathered

namespace twell::tile_union {

// The items of down: 128 tokens of a tile by 256 columns of y, {tile, first column, neurons in the
// tile's union, its first block}.
struct DownItems {
  Tiles tiles;
  const __nv_bfloat16* activations[2];
  const __nv_bfloat16* weight[2];  // [F, D]; the second is null where there is one product
  __nv_bfloat16* y;                // [M, D]
  int32_t* taken;
  int width;              // D
  bool add;               // y += instead of =
  const int32_t* y_rows;  // [M] or null

  DownItems() = default;
  explicit DownItems(const Down& down)
      : tiles(down.tiles),
        activations{down.tiles.activations, down.activations2},
        weight{down.weight, down.weight2},
        y(down.y),
        taken(down.taken),
        width(down.width),
        add(down.add),
        y_rows(down.y_rows) {}

  __device__ __forceinline__ int column_blocks() const { return (width + kColumns - 1) / kColumns; }
  __device__ __forceinline__ int items() const { return tiles.counts->tiles * column_blocks(); }
  // An item in two steps, each of which makes loads that do not depend on each other.
  __device__ __forceinline__ int4 first(int index) const {
    return int4{tiles.order[index / column_blocks()], index % column_blocks() * kColumns, 0, 0};
  }
  __device__ __forceinline__ int4 second(const int4& item) const {
    return int4{item.x, item.y, tiles.union_size[item.x], tiles.first_block[item.x]};
  }
  __device__ __forceinline__ gathered::Operands operands(const int4& item) const {
    const int64_t offset = int64_t{item.w} * gathered::kBytesA;
    const auto image = [&](int i) {
      return reinterpret_cast<const uint8_t*>(activations[i]) + offset;
    };
    return {{image(0), image(1)},
            {reinterpret_cast<const uint4*>(weight[0]), reinterpret_cast<const uint4*>(weight[1])},
            tiles.union_ids + int64_t{item.w} * kBlock,
            item.z,
            (item.z + kBlock - 1) / kBlock,
            weight[1] != nullptr ? 2 : 1,
            item.y,
            tiles.ready + item.x,
            2 * ((item.z + kBlock - 1) / kBlock)};
  }
};

}  // namespace twell::tile_union
