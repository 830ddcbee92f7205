// SPDX-License-Identifier: Apache-2.0
// Which values a training pass computes again in backward instead of storing them. Results are the
// same bit for bit.
#pragma once

#include <cstdint>
#include <limits>

namespace twell {

// Each level includes those before it. Each line names the values per layer and token that are not
// stored, their number, and what is computed instead.
enum class RecomputeLevel {
  kNone,
  kNorms,   // the normalised inputs of both blocks: 2 D; a pass over them
  kInputs,  // the residual stream before the FFN: D; the attention's output projection
  kQkv,     // queries, keys and values: 3 D without grouped heads; their projection, rotation
};

struct Recompute {
  RecomputeLevel level = RecomputeLevel::kNone;
  // Layers below this number have `level`, the others one level less.
  int64_t layers = std::numeric_limits<int64_t>::max();

  RecomputeLevel of_layer(int64_t layer) const {
    if (layer < layers || level == RecomputeLevel::kNone) return level;
    return static_cast<RecomputeLevel>(static_cast<int>(level) - 1);
  }
};

}  // namespace twell
