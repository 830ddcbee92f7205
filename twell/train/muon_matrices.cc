// SPDX-License-Identifier: Apache-2.0
#include "twell/train/muon_matrices.h"

#include <algorithm>

namespace twell {

bool takes_muon(const ParamSpec& param) {
  return !param.is_vector && param.name.starts_with("model.layers.");
}

std::vector<MuonMatrix> muon_matrices(const std::vector<ParamSpec>& table,
                                      const ShardLayout& layout) {
  std::vector<MuonMatrix> matrices;
  int64_t index = 0;
  for (const ParamSpec& param : table) {
    if (!takes_muon(param)) continue;
    // In turn: a layer has matrices of different sizes, and successive layers begin at other ranks
    // unless the number of its matrices is a multiple of that of ranks.
    MuonMatrix& matrix = matrices.emplace_back();
    matrix.offset = param.offset;
    matrix.rows = param.rows;
    matrix.cols = param.cols;
    matrix.owned = index++ % layout.ranks() == layout.rank();
    for (const ShardPiece& piece : layout.pieces()) {
      const int64_t begin = std::max(piece.begin, param.offset);
      const int64_t end = std::min(piece.begin + piece.size, param.offset + param.size());
      if (begin >= end) continue;
      matrix.pieces.push_back({begin, end - begin, piece.local + begin - piece.begin});
    }
  }
  return matrices;
}

}  // namespace twell
