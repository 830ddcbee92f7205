// SPDX-License-Identifier: Apache-2.0
// Weights of one feed-forward layer. One layout everywhere, a neuron per row:
//   w_gate [F, D], w_up [F, D], w_down [F, D], and optional biases.
// Hugging Face stores down_proj as [D, F]; checkpoints are transposed when read and written.
//   gated:      g = relu(x w_gate^T), u = x w_up^T, h = g * u, y = h w_down
//   non-gated:  h = relu(x w_up^T), y = h w_down;  w_gate is empty
// With another activation f instead of relu, see format/activation.h.
// Biases are added to g, u and y; a layer with biases runs dense.
#pragma once

#include <type_traits>

#include "twell/base/matrix.h"
#include "twell/format/activation.h"
#include "twell/format/weight_matrix.h"

namespace twell {

template <typename T, typename View = Matrix<T>>
struct FfnMatrices {
  View w_gate;  // [F, D], empty when the layer is not gated
  View w_up;    // [F, D]
  View w_down;  // [F, D]
  BlendedActivation activation = {};
  T* b_gate = nullptr;  // [F], null when the layer is not gated
  T* b_up = nullptr;    // [F]
  T* b_down = nullptr;  // [D]; all three are null in a layer without biases

  bool biased() const { return b_down != nullptr; }
  bool gated() const { return !w_gate.empty(); }
  int64_t ffn() const { return w_up.rows; }
  int64_t width() const { return w_up.cols; }
  // The projection whose sign decides which neurons fire.
  View firing() const { return gated() ? w_gate : w_up; }
  T* firing_bias() const { return gated() ? b_gate : b_up; }

  // Inference takes weights of any dtype, so also these.
  operator FfnMatrices<const float, WeightMatrix>()
      const requires std::is_same_v<View, ConstMatrixF> {
    return {w_gate, w_up, w_down, activation, b_gate, b_up, b_down};
  }
};

using FfnWeights = FfnMatrices<const float>;
using StoredFfnWeights = FfnMatrices<const float, WeightMatrix>;  // in the dtypes of a file
using FfnGrads = FfnMatrices<float>;                              // accumulated into

}  // namespace twell
