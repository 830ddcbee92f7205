// SPDX-License-Identifier: Apache-2.0
// Elementwise work of the dense execution, one token's row [F] per call: SIMD, picked at run time.
#pragma once

#include <cstdint>

namespace twell {

struct RowActivity {
  int32_t nnz = 0;  // active neurons
  double l1 = 0.0;  // sum of |h|
};

// g = relu(gate); h = g * u. gate [F] is overwritten with g; h [F] is written.
// fired [F], when not null: set to 1 where a neuron is active, else left.
RowActivity relu_gate_row(float* gate, const float* up, float* h, float* fired, int64_t n);
// h = relu(h) in place, for the non-gated layer.
RowActivity relu_row(float* h, float* fired, int64_t n);

// Gated backward of h = g * u with d_h' = d_h + l1 * sign(h):
//   h [F] = g * u, d_up [F] = d_h' * g, and d_h becomes d_gate = d_h' * u where g is active, else
//   0.
void gated_backward_row(const float* gate, const float* up, float l1, float* d_h, float* d_up,
                        float* h, int64_t n);
// Non-gated: d_h becomes d_h + l1 where h is active, else 0.
void relu_backward_row(const float* h, float l1, float* d_h, int64_t n);

}  // namespace twell
