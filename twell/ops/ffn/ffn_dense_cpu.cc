// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/ffn_stages.h"
#include "twell/ops/ffn/gate_multiply_simd.h"
#include "twell/ops/matmul/matmul.h"

namespace twell {

void dense_up_down(Context& ctx, const FfnWeights& weights, ConstMatrixF x, MatrixF gate, MatrixF y,
                   int32_t* row_nnz) {
  Arena::Scope scope(ctx.scratch());
  MatrixF h = gate;
  if (weights.gated()) {
    h = scope.matrix<float>(gate.rows, gate.cols);
    linear_forward(ctx, x, weights.w_up, h);
  }
  constexpr int64_t kGrain = 4;  // rows worth waking a thread for
  ctx.parallel_for(gate.rows, kGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t nnz = weights.gated()
                              ? gate_multiply(gate.row(row), h.row(row), h.row(row), h.cols)
                              : relu_count(h.row(row), h.cols);
      row_nnz[row] = static_cast<int32_t>(nnz);
    }
  });
  matmul(ctx, {.a = h, .b = weights.w_down, .c = y});
}

}  // namespace twell
