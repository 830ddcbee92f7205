// SPDX-License-Identifier: Apache-2.0
// What a layer's calls have measured so far, which the choice of its next execution follows. Plain
// numbers; the kernels' counts they come from are in format/activity_cuda.h.
#pragma once

#include <cstdint>

namespace twell {

// Averages over the calls so far.
struct LayerActivity {
  double nnz_per_token = -1.0;    // negative: nothing measured yet
  double union_share = -1.0;      // union of a tile of 128 tokens over F; negative: not measured
  double largest_union = -1.0;    // the largest union of a call over F; negative: not measured
  double extra_tiles = 0.0;       // tiles of heavy rows, per tile of 128 tokens
  double union_growth = 1.0;      // as below; 1: not measured
  double candidate_share = -1.0;  // like union_share, of the candidates of a screen
  bool operator==(const LayerActivity&) const = default;
};

// How unions grow with the number of tokens, 0 to 1, as measured with these averages: n tokens
// together have the union of n^growth independent ones. Captured layers have 0.7 to 0.8.
double union_growth(const LayerActivity& measured, int64_t ffn);

}  // namespace twell
