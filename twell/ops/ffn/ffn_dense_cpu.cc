// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/activation/activation_rows.h"
#include "twell/ops/bias/bias.h"
#include "twell/ops/ffn/ffn_stages.h"
#include "twell/ops/ffn/gate_multiply_simd.h"
#include "twell/ops/matmul/matmul.h"

namespace twell {
namespace {

// h [n] holds u, or the pre-activation itself when the layer is not gated; it becomes f(gate) * u.
// Returns the number of active neurons.
int64_t activate(const StoredFfnWeights& weights, const float* gate, float* h, int64_t n) {
  const float* const u = weights.gated() ? h : nullptr;
  if (weights.activation.leaves_zeros()) {
    return gate_multiply(gate, u, h, n, weights.activation.is_relu2());
  }
  return activate_row(weights.activation, gate, u, h, nullptr, n).nnz;
}

}  // namespace

void dense_up_down(Context& ctx, const StoredFfnWeights& weights, ConstMatrixF x, MatrixF gate,
                   MatrixF y, int32_t* row_nnz) {
  Arena::Scope scope(ctx.scratch());
  MatrixF h = gate;
  if (weights.gated()) {
    h = scope.matrix<float>(gate.rows, gate.cols);
    linear_forward(ctx, x, weights.w_up, h);
    if (weights.biased()) bias_forward(ctx, weights.b_up, h);
  }
  constexpr int64_t kGrain = 4;  // rows worth waking a thread for
  ctx.parallel_for(gate.rows, kGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      row_nnz[row] = static_cast<int32_t>(activate(weights, gate.row(row), h.row(row), h.cols));
    }
  });
  matmul(ctx, {.a = h, .b = weights.w_down, .c = y});
  if (weights.biased()) bias_forward(ctx, weights.b_down, y);
}

}  // namespace twell
