// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn_train/hybrid_memory_cuda.h"

#include <algorithm>

#include "twell/base/rounding.h"
#include "twell/ops/ffn/sparse_up_down_cuda.h"

namespace twell::ffn_train {
namespace {

using tile_union::kBlock;
using tile_union::kTileTokens;

constexpr int32_t kCompression = 8;
constexpr int64_t kBlockValues = int64_t{kTileTokens} * kBlock;

// A chunk of tokens, at its largest.
struct ChunkShape {
  int64_t tokens, tiles, blocks, mask_words, neuron_tiles, token_blocks;

  explicit ChunkShape(const FfnTrainShapeCuda& shape)
      : tokens(std::min<int64_t>(shape.max_tokens, kChunkTokens)),
        tiles(TileUnionWorkspace::max_tiles(tokens)),
        blocks(ceil_div(shape.ffn, kBlock)),
        mask_words(ceil_div(shape.ffn, kGateTile) * 8),
        neuron_tiles(ceil_div(shape.ffn, kNeuronTile)),
        token_blocks(ceil_div(tokens, kBlock)) {}
  int64_t all_blocks() const { return tiles * blocks; }
  // A union has at most as many neurons as its tile has active pairs; tiles are rounded up.
  int64_t most_blocks(int64_t pairs) const {
    return std::min(all_blocks(), ceil_div(pairs, kBlock) + tiles);
  }
};

}  // namespace

SavedChunk::SavedChunk(const FfnTrainShapeCuda& shape, HybridCapacity capacity, Layout& layout) {
  const ChunkShape chunk(shape);
  kept.state = layout.take<KeptState>(1);
  kept.capacity = capacity.pairs;
  kept.block_capacity = static_cast<int>(capacity.blocks);
  kept.values = layout.take<uint32_t>(capacity.pairs);
  kept.masks = layout.take<uint4>(int64_t{kept.block_capacity} * kBlock);
  kept.offsets = layout.take<uint32_t>(kept.block_capacity);
  tiles.tokens = layout.take<int32_t>(chunk.tiles * kTileTokens);
  tiles.mask = layout.take<uint32_t>(chunk.tiles * chunk.mask_words);
  tiles.before = layout.take<uint32_t>(chunk.tiles * chunk.mask_words);
  tiles.union_size = layout.take<int32_t>(chunk.tiles);
  tiles.first_block = layout.take<int32_t>(chunk.tiles);
  tiles.union_ids = layout.take<int32_t>(chunk.all_blocks() * kBlock);
  tiles.order = layout.take<int32_t>(chunk.tiles);
  tiles.up_items =
      layout.take<int2>(chunk.tiles * ceil_div(chunk.blocks, tile_union::kMaxChunkBlocks - 1));
  tiles.counts = layout.take<tile_union::Counts>(1);
  tiles.blocks = static_cast<int>(chunk.blocks);
  tiles.compact = true;
}

HybridWorkspace::HybridWorkspace(const FfnTrainShapeCuda& shape, Layout& layout) {
  const ChunkShape chunk(shape);
  layout.take<std::byte>(256);  // the dense execution's tickets, which stay 0
  l1_parts = layout.take<double>(chunk.all_blocks());
  for (auto& image : images) image = layout.take<__nv_bfloat16>(chunk.all_blocks() * kBlockValues);
  masks = layout.take<uint4>(chunk.all_blocks() * kBlock);

  neurons.ffn = static_cast<int>(shape.ffn);
  neurons.max_tiles = static_cast<int>(chunk.neuron_tiles);
  neurons.words = static_cast<int>(chunk.tiles) * (kTileTokens / 32);
  neurons.products = shape.gated ? 3 : 2;
  neurons.columns = static_cast<int>(ceil_div(shape.width, tile_union::kColumns));
  const int64_t zero_begin = layout.bytes();
  neurons.nnz = layout.take<int32_t>(shape.ffn);
  neurons.size = layout.take<int32_t>(chunk.neuron_tiles);
  neurons.turns = layout.take<int32_t>(chunk.neuron_tiles * neurons.products * neurons.columns * 2);
  neurons.counts = layout.take<NeuronCounts>(1);
  zero_bytes = layout.bytes() - zero_begin;
  neurons.order = layout.take<int32_t>(chunk.neuron_tiles * kNeuronTile);
  neurons.mask = layout.take<uint32_t>(chunk.neuron_tiles * neurons.words);
  neurons.positions = layout.take<int32_t>(chunk.neuron_tiles * chunk.tiles * kNeuronTile);
  neurons.first_block = layout.take<int32_t>(chunk.neuron_tiles);
  neurons.ids = layout.take<int32_t>(chunk.neuron_tiles * chunk.token_blocks * kBlock);
  neurons.entries = layout.take<int4>(chunk.neuron_tiles * chunk.token_blocks);

  const int64_t shared_begin = layout.bytes();
  const int64_t image = chunk.neuron_tiles * chunk.token_blocks * kNeuronTile * kBlock;
  auto* first = layout.take<__nv_bfloat16>(neurons.products * image);
  for (int p = 0; p < neurons.products; ++p) {
    neurons.images[p] = first != nullptr ? first + p * image : nullptr;
  }
  gate.shape = {chunk.tokens, shape.ffn, kGateTile, kCompression};
  Layout over(reinterpret_cast<std::byte*>(first));
  gate.words = over.take<uint32_t>(gate.shape.words());
  gate.spill_slots = gate.shape.max_spill_slots();
  gate.spill = over.take<BF16>(gate.spill_slots * kGateTile);
  gate.row_nnz = over.take<int32_t>(chunk.tokens);
  const int64_t missing = shared_begin + over.bytes() - layout.bytes();
  if (missing > 0) layout.take<std::byte>(missing);
}

HybridWorkspace HybridWorkspace::of(const FfnTrainWorkspaceCuda::Parts& workspace) {
  Layout layout(workspace.memory);
  return {workspace.shape, layout};
}

HybridChunk::HybridChunk(const FfnSavedCuda::Parts& saved, const HybridWorkspace& work,
                         int64_t index, int64_t all_tokens, const TwellPacked& replay)
    : begin(index * kChunkTokens), tokens(std::min<int64_t>(kChunkTokens, all_tokens - begin)) {
  Layout layout(saved.memory.data());
  for (int64_t i = 0; i < index; ++i) SavedChunk(saved.shape, saved.capacity, layout);
  const SavedChunk own(saved.shape, saved.capacity, layout);
  tiles = own.tiles;
  kept = own.kept;
  tiles.activations = work.images[0];
  tiles.max_tiles = static_cast<int>(TileUnionWorkspace::max_tiles(tokens));
  made = work.gate;
  made.shape.rows = tokens;
  TwellPacked used = made;
  if (replay.words != nullptr) {
    used = replay;
    used.shape.rows = tokens;
    used.words += begin * used.shape.row_words();
    used.row_nnz += begin;
  }
  pattern = {used.words,
             reinterpret_cast<const uint4*>(used.spill),
             used.row_nnz,
             static_cast<int>(tokens),
             static_cast<int>(used.shape.tiles()),
             used.shape.slots()};
}

int64_t hybrid_saved_bytes(const FfnTrainShapeCuda& shape, HybridCapacity capacity) {
  Layout layout;
  for (int64_t begin = 0; begin < shape.max_tokens; begin += kChunkTokens) {
    SavedChunk(shape, capacity, layout);
  }
  return layout.bytes();
}

int64_t hybrid_workspace_bytes(const FfnTrainShapeCuda& shape) {
  Layout layout;
  HybridWorkspace(shape, layout);
  return layout.bytes();
}

HybridCapacity hybrid_capacity(const FfnTrainShapeCuda& shape, double nnz, double union_neurons) {
  // Half as much again as expected, since chunks differ and steps too.
  constexpr double kSlack = 1.5;
  const ChunkShape chunk(shape);
  const auto tokens = static_cast<double>(chunk.tokens);
  const double most = tokens * static_cast<double>(shape.ffn);
  HybridCapacity capacity;
  capacity.pairs = static_cast<int64_t>(std::min(std::max(nnz, 1.0) * kSlack * tokens, most));
  // Blocks of a tile are rounded up, by half of one on average.
  const double blocks_of_tile = kSlack * std::max(union_neurons, 1.0) / kBlock + 1.0;
  const auto expected = static_cast<int64_t>(blocks_of_tile * static_cast<double>(chunk.tiles));
  const auto set_blocks = [&] {
    const int64_t possible = chunk.most_blocks(capacity.pairs);
    capacity.blocks = union_neurons < 0.0 ? possible : std::min(possible, expected);
  };
  set_blocks();
  const int64_t dense = dense_saved_bytes(shape);
  while (capacity.pairs > 0 && hybrid_saved_bytes(shape, capacity) > dense) {
    capacity.pairs /= 2;
    set_blocks();
  }
  return capacity;
}

}  // namespace twell::ffn_train
