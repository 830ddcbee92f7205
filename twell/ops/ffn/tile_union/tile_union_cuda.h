// SPDX-License-Identifier: Apache-2.0
// Tile-union: up and down of a packed gate (packed_ffn_cuda.h) by tiles of 128 tokens: for
// Hopper, and for every GPU of compute capability 8.0 and later.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "twell/base/cuda.h"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"
#include "twell/ops/ffn/packed_ffn_cuda.h"

namespace twell {

struct ScreenedFfnCuda;
namespace tile_union {
struct Tiles;
}

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
  friend void portable_union_up_down_cuda(CudaContext&, const SparseUpDownCuda&,
                                          TileUnionWorkspace&);
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
// The same on mma.sync, for GPUs of compute capability 8.0 and later; not in e4m3, and not while
// the gate GEMM runs.
void portable_union_up_down_cuda(CudaContext& ctx, const SparseUpDownCuda& problem,
                                 TileUnionWorkspace& workspace);

}  // namespace twell
