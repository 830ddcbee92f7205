// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "twell/base/error.h"
#include "twell/ops/ffn/gate_gemm.h"
#include "twell/ops/ffn/gate_pack_simd.h"
#include "twell/ops/matmul/matmul.h"

namespace twell {

GateStats gate_gemm(Context& ctx, const GateGemm& problem) {
  gate_product(ctx, problem);
  return gate_pack(ctx, problem.out);
}

void gate_product(Context& ctx, const GateGemm& problem) {
  const ConstMatrixF& x = problem.x;
  const WeightMatrix& weight = problem.weight;
  const TwellWide& out = problem.out;
  const TwellShape& shape = out.shape;
  const std::string reason = twell_unsupported<uint64_t>(shape);
  TWELL_CHECK(reason.empty(), "{}", reason);
  TWELL_CHECK(x.rows == shape.rows && weight.rows == shape.cols && x.cols == weight.cols,
              "gate shapes disagree: x [{}, {}], weight [{}, {}], TwELL {} x {}", x.rows, x.cols,
              weight.rows, weight.cols, shape.rows, shape.cols);
  TWELL_CHECK(out.row_nnz != nullptr && out.spill_slots >= shape.max_spill_slots(),
              "the gate needs row_nnz and {} spill slots, got {}", shape.max_spill_slots(),
              out.spill_slots);

  linear_forward(ctx, x, weight, gate_dense(out));
}

GateStats gate_pack(Context& ctx, const TwellWide& out) {
  const TwellShape& shape = out.shape;
  // A row of 5,000 columns packs in about a microsecond; waking a thread pays for sixteen of them.
  ctx.parallel_for(shape.rows, 16,
                   [&](int64_t begin, int64_t end, int) { pack_gate_rows(out, begin, end); });

  GateStats stats;
  for (int64_t row = 0; row < shape.rows; ++row) {
    stats.nnz += out.row_nnz[row];
    stats.max_row_nnz = std::max<int64_t>(stats.max_row_nnz, out.row_nnz[row]);
  }
  return stats;
}

TwellWide alloc_twell_wide(Arena::Scope& scope, const TwellShape& shape) {
  TwellWide out;
  out.shape = shape;
  out.words = scope.alloc<uint64_t>(shape.words());
  out.spill_slots = shape.max_spill_slots();
  out.spill = scope.alloc<float>(out.spill_slots * shape.tile);
  out.row_nnz = scope.alloc<int32_t>(shape.rows);
  return out;
}

}  // namespace twell
