// SPDX-License-Identifier: Apache-2.0
// Up and down of the tile-union execution for every GPU of compute capability 8.0 and later, behind
// find_unions and place_gates, on ring_gemm_sm80.cuh.
//   up     activations[tile] = gate[tile] * (x[tile tokens] w_up[union]^T), in place of the gate;
//   or
//          the product alone into a buffer of its own. An item is 128 tokens by up to 256 neurons
//          of a tile's union; rows of x and of w_up are gathered
//   down   y[tile tokens] = activations[tile] w_down[union], or the sum of two such products. An
//          item is 128 tokens by 256 columns of y
#include <algorithm>
#include <cstdint>

#include "twell/gpu/bf16_pair.cuh"
#include "twell/ops/ffn/ring_gemm_sm80.cuh"
#include "twell/ops/ffn/tile_union/gathered_gemm_sm80.cuh"
#include "twell/ops/ffn/tile_union/tile_union_kernels.h"

namespace twell::tile_union {
namespace {

// Items of up are {tile, its first block, its blocks, neurons of the tile's union from there on}.
struct UpItems {
  static constexpr bool kColumns = false;
  static constexpr int kLeastGroups = 1;
  static_assert(kPortableBlocks * kBlock == ring_gemm::kTileN);

  Tiles tiles;
  const __nv_bfloat16* x;       // [M, D]
  const __nv_bfloat16* weight;  // [F, D]
  __nv_bfloat16* out;           // image: of the gate in and of h out, or of the product out
  int32_t* taken;
  int width;  // D
  bool gated, squared, up_relu;
  Condition condition;

  __device__ __forceinline__ int take(int) const { return atomicAdd(taken, 1); }
  __device__ __forceinline__ int items() const { return tiles.counts->up_items; }
  __device__ __forceinline__ int4 first(int index) const {
    const int2 item = tiles.up_items[index];
    return int4{item.x, item.y, 0, 0};
  }
  __device__ __forceinline__ int4 second(const int4& item) const {
    const int begin = item.y & 0xffff;
    return int4{item.x, tiles.first_block[item.x] + begin, item.y >> 16,
                tiles.union_size[item.x] - begin * kBlock};
  }
  __device__ __forceinline__ int groups(const int4& item) const { return item.z; }
  __device__ __forceinline__ int parts(const int4&) const { return 1; }
  __device__ __forceinline__ int steps(const int4&) const {
    return (width + ring_gemm::kStepK - 1) / ring_gemm::kStepK;
  }

  struct Copies {
    static constexpr int kRowsX = ring_gemm::kTileM / ring_gemm::kCopiedRows;
    static constexpr int kRowsW = ring_gemm::kTileN / ring_gemm::kCopiedRows;
    static_assert(ring_gemm::kCopiedRows == kBlock);
    const uint4 *x, *w;                     // this thread's piece of the next k-step, of row 0
    uint32_t x_row[kRowsX], w_row[kRowsW];  // first piece of each row
    uint32_t rows;                          // a bit for each that is read: x_row, then w_row
    int blocks;                             // of w_row that are copied
    int pieces;                             // of a row, from this thread's on

    __device__ __forceinline__ void begin(const UpItems& problem, const int4& item, int) {
      using namespace ring_gemm;
      const int row_pieces = problem.width / 8;
      x = reinterpret_cast<const uint4*>(problem.x) + copied_piece();
      w = reinterpret_cast<const uint4*>(problem.weight) + copied_piece();
      rows = 0;
      blocks = item.x < 0 ? 0 : item.z;
      pieces = item.x < 0 ? 0 : row_pieces - copied_piece();
      const int32_t* tokens = problem.tiles.tokens + item.x * kTileTokens;
      const int32_t* ids = problem.tiles.union_ids + int64_t{item.y} * kBlock;
#pragma unroll
      for (int i = 0; i < kRowsX; ++i) {
        const int token = item.x < 0 ? -1 : tokens[copied_row() + i * kCopiedRows];
        x_row[i] = static_cast<uint32_t>(max(token, 0)) * row_pieces;
        if (token >= 0) rows |= 1u << i;
      }
#pragma unroll
      for (int i = 0; i < kRowsW; ++i) {
        const int position = copied_row() + i * kCopiedRows;
        const bool valid = i < blocks && position < item.w;
        w_row[i] = valid ? static_cast<uint32_t>(ids[position]) * row_pieces : 0;
        if (valid) rows |= 1u << (kRowsX + i);
      }
    }
    __device__ __forceinline__ void copy(const UpItems&, uint32_t stage) {
      using namespace ring_gemm;
      const uint32_t read = pieces > 0 ? rows : 0;
#pragma unroll
      for (int i = 0; i < kRowsX; ++i) {
        gpu::gather16(stage + copied_place(i), x + x_row[i], (read >> i & 1) != 0);
      }
#pragma unroll
      for (int i = 0; i < kRowsW; ++i) {
        gather16_if(i < blocks, stage + kBytesA + copied_place(i), w + w_row[i],
                    (read >> (kRowsX + i) & 1) != 0);
      }
      x += kPieces;
      w += kPieces;
      pieces -= kPieces;
    }
  };

  // f(g) * u in f32, rounded once; or u.
  __device__ __forceinline__ uint32_t hidden(float low, float high, uint32_t gates) const {
    if (gated) {
      const float g0 = gpu::low_half(gates), g1 = gpu::high_half(gates);
      low = gpu::relu_if(up_relu, low);
      high = gpu::relu_if(up_relu, high);
      if (squared) {
        low *= g0;
        high *= g1;
      }
      low *= g0;
      high *= g1;
    }
    return gpu::bf16x2(low, high);
  }

  template <int kGroups>
  __device__ __forceinline__ void finish(const int4& item, const float (&acc)[4][2 * kGroups][4],
                                         uint8_t*) const {
    using namespace ring_gemm;
    auto* image = reinterpret_cast<uint4*>(out) + int64_t{item.y} * (kTileTokens * kBlock / 8);
    const int quad = threadIdx.x % 4;
    constexpr int kTiles = 2 * kGroups;  // of eight neurons: pieces of the image
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(i, half);
        const auto place = [&](int tile) {
          const int of_item = warp_n() * kTiles + tile;
          return image + (of_item / 8 * kTileTokens + row) * 8 + ((of_item % 8) ^ (row % 8));
        };
#pragma unroll
        for (int j = 0; j + 3 < kTiles; j += 4) {
          uint4* to = place(j + quad);
          uint32_t h[4] = {};
          if (gated) {
            const uint4 g = *to;
            h[0] = g.x;
            h[1] = g.y;
            h[2] = g.z;
            h[3] = g.w;
            transpose_quad(h);
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            h[k] = hidden(acc[i][j + k][2 * half], acc[i][j + k][2 * half + 1], h[k]);
          }
          transpose_quad(h);
          *to = uint4{h[0], h[1], h[2], h[3]};
        }
#pragma unroll
        for (int j = kTiles / 4 * 4; j < kTiles; ++j) {
          uint32_t* to = reinterpret_cast<uint32_t*>(place(j)) + quad;
          *to = hidden(acc[i][j][2 * half], acc[i][j][2 * half + 1], gated ? *to : 0);
        }
      }
    }
  }
};

struct PortableDown : DownItems {
  using DownItems::DownItems;
  static constexpr Condition condition = nullptr;

  __device__ __forceinline__ int take(int) const { return atomicAdd(taken, 1); }

  // Rounds, and writes 16 bytes of a row per lane.
  __device__ __forceinline__ void store(const int4& item, const float (&acc)[4][8][4]) const {
    using namespace ring_gemm;
    if (add && item.z == 0) return;
    const int column = item.y + warp_n() * 64 + threadIdx.x % 4 * 8;
    const int32_t* tokens = tiles.tokens + item.x * kTileTokens;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int token = tokens[row_of(i, half)];
        if (y_rows != nullptr && token >= 0) token = y_rows[token];
        __nv_bfloat16* row = y + int64_t{max(token, 0)} * width;
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
          uint32_t out[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            out[k] = gpu::bf16x2(acc[i][j + k][2 * half], acc[i][j + k][2 * half + 1]);
          }
          transpose_quad(out);
          if (token < 0 || column + j * 8 >= width) continue;
          auto* to = reinterpret_cast<uint4*>(row + column + j * 8);
          if (add) {
            const uint4 before = *to;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              const float2 a = gpu::to_floats(gpu::word(before, k)), b = gpu::to_floats(out[k]);
              out[k] = gpu::bf16x2(a.x + b.x, a.y + b.y);
            }
          }
          *to = uint4{out[0], out[1], out[2], out[3]};
        }
      }
    }
  }
};

}  // namespace

cudaError_t launch_up_sm80(const Up& up, int ctas, cudaStream_t stream) {
  UpItems items{};
  items.tiles = up.tiles;
  items.x = up.x;
  items.weight = up.weight;
  items.out = up.product != nullptr ? up.product : up.tiles.activations;
  items.taken = up.taken;
  items.width = up.width;
  items.gated = up.product == nullptr;
  items.squared = up.gate.squared;
  items.up_relu = up.gate.up_relu;
  items.condition = up.condition;
  return ring_gemm::launch(items, ctas, stream);
}

cudaError_t launch_down_sm80(const Down& down, int ctas, cudaStream_t stream) {
  return gathered::launch_sm80(PortableDown(down), ctas, stream);
}

}  // namespace twell::tile_union
