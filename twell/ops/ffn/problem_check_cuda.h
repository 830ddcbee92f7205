// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "twell/base/error.h"
#include "twell/ops/ffn/sparse_up_down_cuda.h"

namespace twell {

// What every execution asks of widths and of the gate's TwELL; empty where that holds.
inline std::string sparse_up_down_misshaped(const SparseUpDownCuda& problem) {
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

}  // namespace twell
