// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/activation/activation_rows.h"
#include "twell/ops/ffn/ffn_stages.h"
#include "twell/ops/ffn/gate_multiply_simd.h"
#include "twell/ops/matmul/matmul.h"

namespace twell {
namespace {

// h [n] holds u, or the pre-activation itself when the layer is not gated; it becomes f(gate) * u.
// Returns the number of values that are not zero.
int64_t activate(const StoredFfnWeights& weights, const float* gate, float* h, int64_t n) {
  if (!weights.activation.is_relu()) {
    return activate_row(weights.activation, gate, weights.gated() ? h : nullptr, h, nullptr, n).nnz;
  }
  return weights.gated() ? gate_multiply(gate, h, h, n) : relu_count(h, n);
}

}  // namespace

void dense_up_down(Context& ctx, const StoredFfnWeights& weights, ConstMatrixF x, MatrixF gate,
                   MatrixF y, int32_t* row_nnz) {
  Arena::Scope scope(ctx.scratch());
  MatrixF h = gate;
  if (weights.gated()) {
    h = scope.matrix<float>(gate.rows, gate.cols);
    linear_forward(ctx, x, weights.w_up, h);
  }
  constexpr int64_t kGrain = 4;  // rows worth waking a thread for
  ctx.parallel_for(gate.rows, kGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      row_nnz[row] = static_cast<int32_t>(activate(weights, gate.row(row), h.row(row), h.cols));
    }
  });
  matmul(ctx, {.a = h, .b = weights.w_down, .c = y});
}

}  // namespace twell
