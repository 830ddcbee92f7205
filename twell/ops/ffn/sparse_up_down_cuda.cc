// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/sparse_up_down_cuda.h"

#include <algorithm>
#include <string>

#include "twell/base/error.h"
#include "twell/base/rounding.h"
#include "twell/ops/ffn/gate_gemm_cuda.h"
#include "twell/ops/ffn/portable/row_fused.h"
#include "twell/ops/ffn/tile_union.h"
#include "twell/sm90/tensor_map.h"

namespace twell {

using namespace tile_union;

namespace {

// Why no execution takes the problem's sizes or its gate's TwELL; empty when they fit.
std::string sparse_up_down_misshaped(const SparseUpDownCuda& problem) {
  if (problem.width % 8 != 0 || problem.ffn % 8 != 0 || problem.width <= 0 || problem.ffn <= 0) {
    return fmt::format("width {} and FFN size {} must be positive multiples of 8", problem.width,
                       problem.ffn);
  }
  const TwellShape& shape = problem.gate.shape;
  if (shape.tile != 256 || shape.slots() < 4 || shape.rows != problem.tokens ||
      shape.cols != problem.ffn) {
    return fmt::format(
        "TwELL of [{}, {}] in tiles of {} with {} words, expected [{}, {}] in tiles of 256 with at "
        "least 4",
        shape.rows, shape.cols, shape.tile, shape.slots(), problem.tokens, problem.ffn);
  }
  return {};
}

// Offsets, in 32-bit words, of what must be 0 at the start of a call.
struct ProgressLayout {
  int64_t tiles, up_items;
  // The gate GEMM's own words come first. Then:
  int64_t counts, marked, ready, items, words;

  ProgressLayout(int64_t tokens, int64_t ffn)
      : tiles(TileUnionWorkspace::max_tiles(tokens)),
        up_items(tiles * ceil_div(ceil_div(ffn, kBlock), kMaxChunkBlocks)),
        counts(GateProgress::kPhases),
        marked(counts + int64_t{sizeof(Counts) / sizeof(int32_t)}),
        ready(marked + tiles),
        items(ceil_div(ready + tiles, 2) * 2),
        words(items + 2 * up_items) {}
};

constexpr int64_t kCounterWords = sizeof(row_fused::Counters) / sizeof(int32_t);

int64_t chunk_count(int64_t width) { return (width + row_fused::kChunk - 1) / row_fused::kChunk; }

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

std::string tile_union_unsupported(const CudaContext& ctx, const SparseUpDownCuda& problem) {
  if (ctx.compute_capability() != 90) {
    return fmt::format("needs a GPU of compute capability 9.0, {} is {}.{}", ctx.device_name(),
                       ctx.compute_capability() / 10, ctx.compute_capability() % 10);
  }
  if (std::string misshaped = sparse_up_down_misshaped(problem); !misshaped.empty()) {
    return misshaped;
  }
  if (problem.ffn > tile_union::kMaxFfn) {
    return fmt::format("FFN size {}, at most {}", problem.ffn, tile_union::kMaxFfn);
  }
  // Kernels count 16-byte pieces of x and of a weight in 32 bits.
  constexpr int64_t kMaxPieces = int64_t{1} << 32;
  const int64_t pieces = std::max(problem.tokens, problem.ffn) * (problem.width / 8);
  if (pieces >= kMaxPieces || problem.tokens > int64_t{1} << 30) {
    return fmt::format("[{}, {}] with FFN size {} is too large for one call", problem.tokens,
                       problem.width, problem.ffn);
  }
  return {};
}

void tile_union_up_down_cuda(CudaContext& ctx, const SparseUpDownCuda& problem,
                             TileUnionWorkspace& workspace) {
  const std::string unsupported = tile_union_unsupported(ctx, problem);
  TWELL_CHECK(unsupported.empty(), "tile-union: {}", unsupported);
  TWELL_CHECK(problem.tokens <= workspace.max_tokens() && problem.ffn <= workspace.ffn(),
              "tile-union: [{}, {}] in a workspace for [{}, {}]", problem.tokens, problem.ffn,
              workspace.max_tokens(), workspace.ffn());
  if (problem.tokens == 0) return;
  Tiles tiles{};
  tiles.tokens = workspace.tile_tokens_.data();
  tiles.mask = workspace.mask_.data();
  tiles.union_size = workspace.union_size_.data();
  tiles.first_block = workspace.first_block_.data();
  tiles.union_ids = workspace.union_ids_.data();
  tiles.activations = workspace.activations_.data();
  tiles.order = workspace.tile_order_.data();
  const GateProgress progress = workspace.progress(problem.tokens);
  const ProgressLayout layout(problem.tokens, workspace.ffn());
  tiles.up_items = reinterpret_cast<int2*>(progress.words + layout.items);
  tiles.counts = reinterpret_cast<Counts*>(progress.words + layout.counts);
  tiles.blocks = static_cast<int>(ceil_div(problem.ffn, kBlock));
  tiles.max_tiles = static_cast<int>(layout.tiles);
  tiles.max_up_items = static_cast<int>(layout.up_items);

  const TwellPacked& packed = problem.gate;
  const Gate gate{packed.words,
                  reinterpret_cast<const uint4*>(packed.spill),
                  packed.row_nnz,
                  static_cast<int>(problem.tokens),
                  static_cast<int>(packed.shape.tiles()),
                  packed.shape.slots(),
                  problem.follows_gate ? progress.words : nullptr,
                  gate_gemm_phases(ctx, problem.tokens, problem.ffn)};
  const cudaStream_t stream = ctx.stream();
  const int ctas = ctx.multiprocessors();
  const auto width = static_cast<int>(problem.width);
  const bool gated = problem.w_up != nullptr;
  tiles.before = workspace.before_.data();
  tiles.heavy = workspace.heavy_.data();
  tiles.marked = progress.words + layout.marked;
  if (gated) {
    tiles.ready = progress.words + layout.ready;
    tiles.entries = workspace.entries_.data();
    tiles.listed = workspace.listed_.data();
  }
  TWELL_CUDA_CHECK(launch_find_unions(gate, tiles, problem.activity, progress.words, progress.size,
                                      ctas, stream));
  if (gated) {
    Up up{};
    up.map_x = sm90::matrix_tensor_map(problem.x, problem.tokens, problem.width, kTileTokens);
    up.tiles = tiles;
    up.gate = gate;
    up.x = problem.x;
    up.weight = problem.w_up;
    up.taken = &tiles.counts->up_taken;
    up.width = width;
    TWELL_CUDA_CHECK(launch_up_sm90(up, ctas, stream));
  } else {
    TWELL_CUDA_CHECK(launch_place_gates(gate, tiles, ctas, stream));
  }
  const Down down{.tiles = tiles,
                  .weight = problem.w_down,
                  .y = problem.y,
                  .taken = &tiles.counts->down_taken,
                  .width = width,
                  .add = problem.add};
  TWELL_CUDA_CHECK(launch_down_sm90(down, ctas, stream));
}

RowFusedWorkspace::RowFusedWorkspace(CudaContext& ctx, int64_t max_tokens, int64_t max_width)
    : max_tokens_(max_tokens),
      max_width_(max_width),
      heavy_rows_(max_tokens),
      counters_(kCounterWords + row_fused::kSplitTarget * chunk_count(max_width)),
      partials_(row_fused::kMaxPartials * max_width) {
  TWELL_CUDA_CHECK(
      cudaMemsetAsync(counters_.data(), 0, static_cast<size_t>(counters_.bytes()), ctx.stream()));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
}

std::string row_fused_unsupported(const CudaContext& ctx, const SparseUpDownCuda& problem) {
  if (ctx.compute_capability() < 80) {
    return fmt::format("needs a GPU of compute capability 8.0 or later, {} is {}.{}",
                       ctx.device_name(), ctx.compute_capability() / 10,
                       ctx.compute_capability() % 10);
  }
  if (std::string misshaped = sparse_up_down_misshaped(problem); !misshaped.empty()) {
    return misshaped;
  }
  constexpr int64_t kMost = int64_t{1} << 30;
  if (problem.tokens > kMost || problem.ffn > kMost || problem.width > int64_t{1} << 24) {
    return fmt::format("[{}, {}] with FFN size {} is too large for one call", problem.tokens,
                       problem.width, problem.ffn);
  }
  return {};
}

void row_fused_up_down_cuda(CudaContext& ctx, const SparseUpDownCuda& problem,
                            RowFusedWorkspace& workspace) {
  const std::string unsupported = row_fused_unsupported(ctx, problem);
  TWELL_CHECK(unsupported.empty(), "row-fused: {}", unsupported);
  TWELL_CHECK(problem.tokens <= workspace.max_tokens() && problem.width <= workspace.max_width(),
              "row-fused: [{}, {}] in a workspace for [{}, {}]", problem.tokens, problem.width,
              workspace.max_tokens(), workspace.max_width());
  if (problem.tokens == 0) return;
  const TwellPacked& packed = problem.gate;
  int32_t* counters = workspace.counters_.data();
  const row_fused::Problem kernels{packed.words,
                                   reinterpret_cast<const uint16_t*>(packed.spill),
                                   packed.row_nnz,
                                   problem.tokens,
                                   static_cast<int>(packed.shape.tiles()),
                                   packed.shape.slots(),
                                   problem.x,
                                   problem.w_up,
                                   problem.w_down,
                                   problem.y,
                                   static_cast<int>(problem.width),
                                   static_cast<int>(chunk_count(problem.width)),
                                   workspace.heavy_rows_.data(),
                                   reinterpret_cast<row_fused::Counters*>(counters),
                                   counters + kCounterWords,
                                   workspace.partials_.data(),
                                   problem.add};
  TWELL_CUDA_CHECK(row_fused::launch_light_rows(kernels, ctx.stream()));
  TWELL_CUDA_CHECK(row_fused::launch_heavy_rows(kernels, ctx.multiprocessors(), ctx.stream()));
  if (problem.activity != nullptr) {
    TWELL_CUDA_CHECK(row_fused::launch_count_rows(packed.row_nnz, problem.tokens, problem.activity,
                                                  ctx.stream()));
  }
}

}  // namespace twell
