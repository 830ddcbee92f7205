// SPDX-License-Identifier: Apache-2.0
// Selects the values that a training pass recomputes in backward instead of storing them. Results
// are bitwise equal.
#pragma once

#include <cstdint>
#include <limits>

namespace twell {

// Each level includes the previous ones. Each line lists the values per layer and token that are
// not stored, their number, and what is recomputed.
enum class RecomputeLevel {
  kNone,
  kNorms,   // the normalised inputs of both blocks: 2 D; a pass over them
  kInputs,  // the residual stream before the FFN: D; the attention's output projection
  kQkv,     // queries, keys and values: 3 D without grouped heads; their projection, rotation
};

struct Recompute {
  RecomputeLevel level = RecomputeLevel::kNone;
  // Layers below this number use `level`, all others one level less.
  int64_t layers = std::numeric_limits<int64_t>::max();

  RecomputeLevel of_layer(int64_t layer) const {
    if (layer < layers || level == RecomputeLevel::kNone) return level;
    return static_cast<RecomputeLevel>(static_cast<int>(level) - 1);
  }
};

}  // namespace twell
