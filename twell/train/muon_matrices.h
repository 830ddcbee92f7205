// SPDX-License-Identifier: Apache-2.0
// The matrices that Muon updates, and what a rank does for them. Momentum and steps are
// elementwise: a rank takes them on its pieces (shard_layout.h). Between them a matrix must be
// whole: every rank gathers all updates, orthogonalises the matrices that it owns, and the pieces
// of the results are exchanged as gradients are, by a sum in which all other ranks have zeros.
#pragma once

#include <cstdint>
#include <vector>

#include "twell/model/weights.h"
#include "twell/train/shard_layout.h"

namespace twell {

// Matrices of layers; embedding, head, norms and biases stay with AdamW.
bool takes_muon(const ParamSpec& param);

struct MuonMatrix {
  int64_t offset = 0;  // in the flat array
  int64_t rows = 0;
  int64_t cols = 0;
  bool owned = false;              // by this rank
  std::vector<ShardPiece> pieces;  // of this rank within the matrix
  int64_t size() const { return rows * cols; }
};
std::vector<MuonMatrix> muon_matrices(const std::vector<ParamSpec>& table,
                                      const ShardLayout& layout);

}  // namespace twell
