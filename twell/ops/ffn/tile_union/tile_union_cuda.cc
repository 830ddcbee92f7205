// SPDX-License-Identifier: Apache-2.0
// The workspace of tile-union, and the layers made of its kernels: behind a packed gate, and behind
// a screen.
#include "twell/ops/ffn/tile_union/tile_union_cuda.h"

#include <algorithm>
#include <cstdint>

#include "twell/base/rounding.h"
#include "twell/gpu/sm90/tensor_map.h"
#include "twell/ops/ffn/screened/screened_ffn_cuda.h"
#include "twell/ops/ffn/tile_union/tile_union_kernels.h"

namespace twell {

using namespace tile_union;

namespace {

// Offsets, in 32-bit words, of what must be 0 at the start of a call.
struct ProgressLayout {
  int64_t tiles, up_items;
  // The gate GEMM's own words come first. Then:
  int64_t counts, marked, ready, items, words;

  ProgressLayout(int64_t tokens, int64_t ffn)
      : tiles(TileUnionWorkspace::max_tiles(tokens)),
        up_items(tiles * ceil_div(ceil_div(ffn, kBlock), std::min(kMaxChunkBlocks, kGateUpBlocks)) +
                 2 * kSpreadItems),
        counts(GateProgress::kPhases),
        marked(counts + int64_t{sizeof(Counts) / sizeof(int32_t)}),
        ready(marked + tiles),
        items(ceil_div(ready + tiles, 2) * 2),
        words(items + 2 * up_items) {}
};

}  // namespace

int64_t TileUnionWorkspace::max_tiles(int64_t tokens) {
  return ceil_div(tokens, kTileTokens) + ceil_div(tokens / kHeavyFactor, kTileTokens);
}

TileUnionWorkspace::TileUnionWorkspace(int64_t max_tokens, int64_t ffn)
    : max_tokens_(max_tokens), ffn_(ffn) {
  const int64_t tiles = max_tiles(max_tokens), blocks = ceil_div(ffn, kBlock);
  tile_tokens_ = DeviceBuffer<int32_t>(tiles * kTileTokens);
  mask_ = DeviceBuffer<uint32_t>(tiles * ceil_div(ffn, 256) * 8);
  before_ = DeviceBuffer<uint32_t>(mask_.size());
  union_size_ = DeviceBuffer<int32_t>(tiles);
  heavy_ = DeviceBuffer<uint4>(tiles);
  progress_ = DeviceBuffer<int32_t>(ProgressLayout(max_tokens, ffn).words);
  entries_ = DeviceBuffer<uint32_t>(tiles * ceil_div(ffn, 256) * kListed);
  listed_ = DeviceBuffer<int32_t>(tiles * ceil_div(ffn, 256));
  first_block_ = DeviceBuffer<int32_t>(tiles);
  union_ids_ = DeviceBuffer<int32_t>(tiles * blocks * kBlock);
  activations_ = DeviceBuffer<__nv_bfloat16>(tiles * blocks * kTileTokens * kBlock);
  tile_order_ = DeviceBuffer<int32_t>(tiles);
}

int64_t TileUnionWorkspace::bytes_needed(int64_t max_tokens, int64_t ffn) {
  const int64_t tiles = max_tiles(max_tokens), blocks = ceil_div(ffn, kBlock);
  constexpr int64_t kWord = sizeof(int32_t);
  // Per tile: tokens, mask and prefix counts, non-zeros and their number, neurons and values, heavy
  // rows, size, first block and order.
  return tiles * (kTileTokens * kWord + ceil_div(ffn, 256) * (16 + kListed + 1) * kWord +
                  blocks * kBlock * kWord +
                  blocks * kBlock * kTileTokens * int64_t{sizeof(__nv_bfloat16)} +
                  int64_t{sizeof(uint4)} + 3 * kWord) +
         ProgressLayout(max_tokens, ffn).words * kWord;
}

int64_t TileUnionWorkspace::bytes() const {
  return tile_tokens_.bytes() + mask_.bytes() + before_.bytes() + union_size_.bytes() +
         first_block_.bytes() + heavy_.bytes() + progress_.bytes() + entries_.bytes() +
         listed_.bytes() + union_ids_.bytes() + activations_.bytes() + tile_order_.bytes();
}

GateProgress TileUnionWorkspace::progress(int64_t tokens) const {
  return {progress_.data(), ProgressLayout(tokens, ffn_).words};
}

// What all calls of up and down share; `tokens` of a call.
Tiles TileUnionWorkspace::tiles(int64_t tokens, int64_t ffn) const {
  const GateProgress of_call = progress(tokens);
  const ProgressLayout layout(tokens, ffn_);
  Tiles tiles{};
  tiles.tokens = tile_tokens_.data();
  tiles.mask = mask_.data();
  tiles.union_size = union_size_.data();
  tiles.first_block = first_block_.data();
  tiles.before = before_.data();
  tiles.heavy = heavy_.data();
  tiles.marked = of_call.words + layout.marked;
  tiles.union_ids = union_ids_.data();
  tiles.activations = activations_.data();
  tiles.order = tile_order_.data();
  tiles.up_items = reinterpret_cast<int2*>(of_call.words + layout.items);
  tiles.counts = reinterpret_cast<Counts*>(of_call.words + layout.counts);
  tiles.blocks = static_cast<int>(ceil_div(ffn, kBlock));
  tiles.max_tiles = static_cast<int>(layout.tiles);
  tiles.max_up_items = static_cast<int>(layout.up_items);
  tiles.spread = kSpreadItems / static_cast<int>(ceil_div(tokens, kTileTokens));
  tiles.ready = of_call.words + layout.ready;
  return tiles;
}

namespace {

// The products of SparseUpDownCuda and ScreenedFfnCuda, which name their operands alike.
template <typename Problem>
Up up_of(const Problem& problem, const Gate& gate, const Tiles& tiles) {
  Up up{};
  if (problem.x != nullptr) {
    up.map_x = gpu::matrix_tensor_map(problem.x, problem.tokens, problem.width, kTileTokens);
  }
  up.tiles = tiles;
  up.gate = gate;
  up.x = problem.x;
  up.weight = problem.w_up;
  up.taken = &tiles.counts->up_taken;
  up.width = static_cast<int>(problem.width);
  return up;
}

template <typename Problem>
Down down_of(const Problem& problem, const Tiles& tiles) {
  return {.tiles = tiles,
          .weight = problem.w_down,
          .y = problem.y,
          .taken = &tiles.counts->down_taken,
          .width = static_cast<int>(problem.width),
          .add = problem.add,
          .y_rows = problem.y_rows};
}

}  // namespace

void tile_union_up_down_cuda(CudaContext& ctx, const SparseUpDownCuda& problem,
                             TileUnionWorkspace& workspace) {
  check_packed_ffn(ctx, problem.tokens, problem.width, problem.ffn, problem.gate);
  TWELL_CHECK(problem.tokens <= workspace.max_tokens_ && problem.ffn <= workspace.ffn_,
              "tile-union: [{}, {}] in a workspace for [{}, {}]", problem.tokens, problem.ffn,
              workspace.max_tokens_, workspace.ffn_);
  if (problem.tokens == 0) return;
  const GateProgress progress = workspace.progress(problem.tokens);
  Tiles tiles = workspace.tiles(problem.tokens, problem.ffn);
  const TwellPacked& packed = problem.gate;
  const Gate gate{packed.words,
                  reinterpret_cast<const uint4*>(packed.spill),
                  packed.row_nnz,
                  static_cast<int>(problem.tokens),
                  static_cast<int>(packed.shape.tiles()),
                  packed.shape.slots(),
                  problem.follows_gate ? progress.words : nullptr,
                  gate_gemm_phases(ctx, problem.tokens, problem.ffn),
                  problem.squared,
                  problem.up_relu};
  const cudaStream_t stream = ctx.stream();
  const int ctas = ctx.multiprocessors();
  const bool gated = problem.gated();
  if (gated) {
    tiles.entries = workspace.entries_.data();
    tiles.listed = workspace.listed_.data();
  } else {
    tiles.ready = nullptr;
  }
  TWELL_CUDA_CHECK(launch_find_unions(gate, tiles, problem.activity, progress.words, progress.size,
                                      ctas, stream));
  if (gated) {
    Up up = up_of(problem, gate, tiles);
    if (problem.in_bytes()) {
      up.map_x = gpu::byte_matrix_tensor_map(problem.x_bytes.values, problem.tokens, problem.width,
                                             kTileTokens);
      up.x_bytes = problem.x_bytes;
      up.weight_bytes = problem.w_up_bytes;
    }
    TWELL_CUDA_CHECK(launch_up_sm90(up, ctas, stream));
  } else {
    TWELL_CUDA_CHECK(launch_place_gates(gate, tiles, ctas, stream));
  }
  Down down = down_of(problem, tiles);
  down.y_scales = problem.y_scales;
  if (problem.in_bytes()) {
    down.weight_bytes = problem.w_down_bytes;
    TWELL_CUDA_CHECK(launch_byte_down_sm90(down, ctas, stream));
  } else {
    TWELL_CUDA_CHECK(launch_down_sm90(down, ctas, stream));
  }
}

void portable_union_up_down_cuda(CudaContext& ctx, const SparseUpDownCuda& problem,
                                 TileUnionWorkspace& workspace) {
  check_packed_ffn(ctx, problem.tokens, problem.width, problem.ffn, problem.gate,
                   /*portable=*/true);
  TWELL_CHECK(problem.tokens <= workspace.max_tokens_ && problem.ffn <= workspace.ffn_,
              "portable-union: [{}, {}] in a workspace for [{}, {}]", problem.tokens, problem.ffn,
              workspace.max_tokens_, workspace.ffn_);
  TWELL_CHECK(!problem.in_bytes() && !problem.follows_gate,
              "portable-union takes bf16, behind a gate that is complete");
  if (problem.tokens == 0) return;
  const GateProgress progress = workspace.progress(problem.tokens);
  Tiles tiles = workspace.tiles(problem.tokens, problem.ffn);
  tiles.ready = nullptr;
  tiles.chunk_blocks = kPortableBlocks;
  const bool gated = problem.gated();
  const TwellPacked& packed = problem.gate;
  Gate gate{};
  gate.words = packed.words;
  gate.spill = reinterpret_cast<const uint4*>(packed.spill);
  gate.row_nnz = packed.row_nnz;
  gate.rows = static_cast<int>(problem.tokens);
  gate.col_tiles = static_cast<int>(packed.shape.tiles());
  gate.slots = packed.shape.slots();
  gate.up_relu = problem.up_relu;
  // With a gate, up squares it in f32.
  gate.squared = problem.squared && !gated;
  const cudaStream_t stream = ctx.stream();
  const int ctas = ctx.multiprocessors();
  TWELL_CUDA_CHECK(launch_find_unions(gate, tiles, problem.activity, progress.words, progress.size,
                                      ctas, stream));
  TWELL_CUDA_CHECK(launch_place_gates(gate, tiles, ctas, stream));
  if (gated) {
    Up up{};
    up.tiles = tiles;
    up.gate = gate;
    up.gate.squared = problem.squared;
    up.x = problem.x;
    up.weight = problem.w_up;
    up.taken = &tiles.counts->up_taken;
    up.width = static_cast<int>(problem.width);
    TWELL_CUDA_CHECK(launch_up_sm80(up, ctas, stream));
  }
  Down down{};
  down.tiles = tiles;
  down.weight = problem.w_down;
  down.y = problem.y;
  down.taken = &tiles.counts->down_taken;
  down.width = static_cast<int>(problem.width);
  down.add = problem.add;
  down.y_rows = problem.y_rows;
  TWELL_CUDA_CHECK(launch_down_sm80(down, ctas, stream));
}

void screened_ffn_cuda(CudaContext& ctx, const ScreenedFfnCuda& problem,
                       TileUnionWorkspace& workspace) {
  TWELL_CHECK(problem.tokens <= workspace.max_tokens_ && problem.ffn <= workspace.ffn_,
              "screened FFN: [{}, {}] in a workspace for [{}, {}]", problem.tokens, problem.ffn,
              workspace.max_tokens_, workspace.ffn_);
  if (problem.tokens == 0) return;
  if (problem.row_nnz != nullptr) {
    TWELL_CUDA_CHECK(cudaMemsetAsync(
        problem.row_nnz, 0, static_cast<size_t>(problem.tokens) * sizeof(int32_t), ctx.stream()));
  }
  const GateProgress progress = workspace.progress(problem.tokens);
  screen_gemm_cuda(ctx, {.tokens = problem.tokens,
                         .width = problem.width,
                         .ffn = problem.ffn,
                         .x = problem.rotated,
                         .gate = problem.screen,
                         .out = problem.candidates,
                         .progress = progress});
  Tiles tiles = workspace.tiles(problem.tokens, problem.ffn);
  tiles.chunk_blocks = kGateUpBlocks;
  const Gate gate{.row_nnz = problem.candidates.row_count,
                  .rows = static_cast<int>(problem.tokens),
                  .col_tiles = static_cast<int>(ceil_div(problem.ffn, 256)),
                  .squared = problem.squared,
                  .up_relu = problem.up_relu,
                  .cut = problem.cut,
                  .candidates = problem.candidates.words};
  const cudaStream_t stream = ctx.stream();
  const int ctas = ctx.multiprocessors();
  TWELL_CUDA_CHECK(launch_find_unions(gate, tiles, problem.activity, nullptr, 0, ctas, stream));
  Up up = up_of(problem, gate, tiles);
  up.gate_weight = problem.w_gate;
  up.activity = problem.activity;
  up.row_nnz = problem.row_nnz;
  TWELL_CUDA_CHECK(launch_up_sm90(up, ctas, stream));
  TWELL_CUDA_CHECK(launch_down_sm90(down_of(problem, tiles), ctas, stream));
}

}  // namespace twell
