// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "twell/base/error.h"
#include "twell/ops/ffn/sparse_up_down.h"

namespace twell {

inline void check_sparse_up_down(const SparseUpDown& problem) {
  const auto& [gate, x, w_up, w_down, y, squared] = problem;
  TWELL_CHECK(w_down.rows == gate.shape.cols && y.rows == gate.shape.rows && y.cols == w_down.cols,
              "up/down shapes disagree: gate {} x {}, w_down [{}, {}], y [{}, {}]", gate.shape.rows,
              gate.shape.cols, w_down.rows, w_down.cols, y.rows, y.cols);
  if (w_up.empty()) return;
  TWELL_CHECK(x.rows == y.rows && x.cols == w_up.cols && w_up.rows == w_down.rows &&
                  w_up.cols == w_down.cols,
              "up/down shapes disagree: x [{}, {}], w_up [{}, {}], w_down [{}, {}], y [{}, {}]",
              x.rows, x.cols, w_up.rows, w_up.cols, w_down.rows, w_down.cols, y.rows, y.cols);
}

}  // namespace twell
