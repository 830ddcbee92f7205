// SPDX-License-Identifier: Apache-2.0
// What a training pass computes again in backward instead of keeping it. Results are the same bit
// for bit.
#pragma once

#include <cstdint>
#include <limits>

namespace twell {

// Each level includes those before it. Per layer and token: which values are not kept, how many,
// and what is computed instead.
enum class RecomputeLevel {
  kNone,
  kNorms,   // the normalised inputs of both blocks: 2 D; a pass over them
  kInputs,  // the residual stream in front of the FFN: D; the attention's output projection
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
