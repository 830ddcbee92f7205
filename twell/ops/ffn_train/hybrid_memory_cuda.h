// SPDX-License-Identifier: Apache-2.0
// Memory of the hybrid execution of the feed-forward layer in training on the GPU: what forward
// keeps of each chunk of tokens, and what one chunk in flight works in.
#pragma once

#include "twell/ops/ffn_train/ffn_train_parts_cuda.h"
#include "twell/ops/ffn_train/hybrid_train.h"

namespace twell::ffn_train {

inline constexpr int32_t kGateTile = 256;  // of the TwELL that the pattern comes from

// What one chunk of one layer keeps. Pointers are pieces of `layout`, null where it only counts.
struct SavedChunk {
  Tiles tiles{};
  Kept kept{};

  SavedChunk(const FfnTrainShapeCuda& shape, HybridCapacity capacity, Layout& layout);
};

// Memory of one chunk in flight, pieces of `layout` too.
struct HybridWorkspace {
  double* l1_parts;          // [blocks]
  __nv_bfloat16* images[3];  // of token tiles, [blocks, kTileTokens, kBlock]: g or h; u or d_u;
                             // d_h or d_g
  uint4* masks;              // [blocks, kBlock]
  // Either the gate's TwELL
  TwellPacked gate;
  // or the neuron tiles.
  NeuronTiles neurons{};
  int64_t zero_bytes;  // from neurons.nnz on: 0 before backward

  HybridWorkspace(const FfnTrainShapeCuda& shape, Layout& layout);
  static HybridWorkspace of(const FfnTrainWorkspaceCuda::Parts& workspace);
};

// A chunk of a call: its tiles with the images of the workspace, the gate, the launches' sizes.
struct HybridChunk {
  int64_t begin, tokens;
  Tiles tiles;
  Kept kept;
  TwellPacked made;          // by the gate GEMM
  tile_union::Gate pattern;  // what is worked on: that, or what is replayed

  HybridChunk(const FfnSavedCuda::Parts& saved, const HybridWorkspace& work, int64_t index,
              int64_t all_tokens, const TwellPacked& replay);
};

}  // namespace twell::ffn_train
