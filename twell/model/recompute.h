// SPDX-License-Identifier: Apache-2.0
// What a training pass makes again in backward instead of keeping it in memory. The results are the
// same to the bit.
#pragma once

#include <cstdint>
#include <limits>

namespace twell {

// Each level with those before it. Memory and time are of one layer, per token and width D: values
// not kept, and what is computed in their place.
enum class RecomputeLevel {
  kNone,
  kNorms,   // the normalised inputs of both blocks: 2 D; a pass over them
  kInputs,  // the residual stream in front of the FFN: D; the attention's output projection
  kQkv,     // queries, keys and values: 3 D without grouped heads; their projection, rotation
};

struct Recompute {
  RecomputeLevel level = RecomputeLevel::kNone;
  int64_t layers = std::numeric_limits<int64_t>::max();  // the first so many; others a level less

  RecomputeLevel of_layer(int64_t layer) const {
    if (layer < layers || level == RecomputeLevel::kNone) return level;
    return static_cast<RecomputeLevel>(static_cast<int>(level) - 1);
  }
};

}  // namespace twell
