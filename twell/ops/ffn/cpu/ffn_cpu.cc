// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "twell/base/error.h"
#include "twell/ops/activation/activation_rows.h"
#include "twell/ops/bias/bias.h"
#include "twell/ops/ffn/cpu/ffn_cost.h"
#include "twell/ops/ffn/cpu/sparse_up_down.h"
#include "twell/ops/ffn/ffn.h"
#include "twell/ops/ffn/gate/gate_gemm.h"
#include "twell/ops/matmul/matmul.h"

namespace twell {
namespace {

struct Chunk {
  const StoredFfnWeights& weights;
  ConstMatrixF x;    // [m, D]
  MatrixF y;         // [m, D]
  int32_t* row_nnz;  // [m]
};

struct Outcome {
  FfnExecution execution = FfnExecution::kDense;
  FfnWork work;
};

// Whether the execution follows from what is measured: sparse alone leaves two to choose from.
bool measures(FfnPolicy policy) { return chooses(policy) || policy == FfnPolicy::kSparse; }

// What a policy names; dense where the CPU has no such execution.
FfnExecution named_execution(FfnPolicy policy) {
  for (const FfnExecution execution : {FfnExecution::kRowFused, FfnExecution::kTileUnion}) {
    if (policy.kind == FfnPolicy::Kind::kNamed && policy.execution == execution.name) {
      return execution;
    }
  }
  return FfnExecution::kDense;
}

// y = FFN, given gate = x firing()^T [M, F] before its activation, with its bias. Without an up
// projection the gate is overwritten. row_nnz [M] receives the active neurons of each token.
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
      float* const u = h.row(row);  // becomes f(gate) * u
      const ActivatedRow activated = activate_row(
          weights.activation, gate.row(row), weights.gated() ? u : nullptr, u, nullptr, h.cols);
      row_nnz[row] = static_cast<int32_t>(activated.nnz);
    }
  });
  matmul(ctx, {.a = h, .b = weights.w_down, .c = y});
  if (weights.biased()) bias_forward(ctx, weights.b_down, y);
}

// Runs dense without packing: active neurons are counted in the multiplication.
Outcome run_dense(Context& ctx, const Chunk& chunk) {
  Arena::Scope scope(ctx.scratch());
  const int64_t m = chunk.x.rows;
  const int64_t ffn = chunk.weights.ffn();
  const MatrixF gate = scope.matrix<float>(m, ffn);
  linear_forward(ctx, chunk.x, chunk.weights.firing(), gate);
  if (chunk.weights.biased()) bias_forward(ctx, chunk.weights.firing_bias(), gate);
  dense_up_down(ctx, chunk.weights, chunk.x, gate, chunk.y, chunk.row_nnz);
  return {FfnExecution::kDense, {.tokens = m, .ffn = ffn}};
}

// Estimates the non-zeros of a gate before its ReLU from a few of its rows, which costs next to
// nothing; packing all rows in vain would take a few percent of a dense layer. A pure function of
// the tokens.
FfnWork sampled_work(ConstMatrixF gate, float threshold) {
  constexpr int64_t kSampleRows = 16;
  const int64_t rows = std::min(gate.rows, kSampleRows);
  int64_t nnz = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const float* const row = gate.row(i * gate.rows / rows);
    nnz += std::count_if(row, row + gate.cols, [&](float value) { return !(value <= threshold); });
  }
  return {.tokens = gate.rows, .ffn = gate.cols, .nnz = nnz * gate.rows / rows};
}

Outcome run_packed(Context& ctx, const Chunk& chunk, FfnPolicy policy) {
  Arena::Scope scope(ctx.scratch());
  const auto& [weights, x, y, row_nnz] = chunk;
  const float threshold = weights.activation.zero_up_to();
  TwellWide gate = alloc_twell_wide(scope, {.rows = x.rows, .cols = weights.ffn()});
  gate_product(ctx, {.x = x, .weight = weights.firing(), .out = gate});
  if (chooses(policy)) {
    const FfnWork work = sampled_work(gate_dense(gate), threshold);
    if (surely_dense(work)) {
      dense_up_down(ctx, weights, x, gate_dense(gate), y, row_nnz);
      return {FfnExecution::kDense, work};
    }
  }
  const int64_t nnz = gate_pack(ctx, gate, threshold);
  std::copy_n(gate.row_nnz, x.rows, row_nnz);

  Outcome out{named_execution(policy), {.tokens = x.rows, .ffn = weights.ffn(), .nnz = nnz}};
  if (policy == FfnPolicy::kSparse || (chooses(policy) && !surely_dense(out.work))) {
    out.work.union_size = tile_union_size(ctx, gate, weights.width());
    out.execution = chooses(policy) ? cheapest_execution(out.work) : cheapest_sparse(out.work);
  }
  const SparseUpDown sparse{.gate = gate,
                            .x = x,
                            .w_up = weights.gated() ? weights.w_up : WeightMatrix(),
                            .w_down = weights.w_down,
                            .y = y,
                            .squared = weights.activation.is_relu2(),
                            .up_relu = weights.activation.is_drelu()};
  if (!out.execution.sparse) {
    dense_up_down(ctx, weights, x, gate_dense(gate), y, row_nnz);
  } else if (out.execution == FfnExecution::kRowFused) {
    row_fused_up_down(ctx, sparse);
  } else {
    tile_union_up_down(ctx, sparse);
  }
  return out;
}

std::string explain(FfnPolicy policy, const StoredFfnWeights& weights, const FfnWork& work) {
  if (!weights.activation.leaves_zeros()) {
    return fmt::format("{} leaves no zeros to skip", activation_name(weights.activation.kind));
  }
  if (weights.biased()) return "layers with biases run dense";
  const bool named = policy.kind == FfnPolicy::Kind::kNamed;
  if (named && !named_execution(policy).sparse) {
    return fmt::format("{} was set, but the CPU has no such execution", policy.execution);
  }
  if (!measures(policy)) return "set by the caller";
  const double dense = dense_cost(work);
  const double per_token = static_cast<double>(work.nnz) / static_cast<double>(work.tokens);
  if (chooses(policy) && surely_dense(work)) {
    return fmt::format("{:.1f} of {} neurons active per token: too many for a sparse execution",
                       per_token, work.ffn);
  }
  return fmt::format(
      "{:.1f} of {} neurons active per token: up and down estimated at {:.3f} (row-fused) and "
      "{:.3f} (tile-union) of dense",
      per_token, work.ffn, row_fused_cost(work) / dense, tile_union_cost(work) / dense);
}

void check_shapes(const StoredFfnWeights& weights, ConstMatrixF x, MatrixF y,
                  std::span<int32_t> row_nnz) {
  const int64_t width = weights.width();
  const int64_t ffn = weights.ffn();
  TWELL_CHECK(
      weights.w_down.rows == ffn && weights.w_down.cols == width &&
          (!weights.gated() || (weights.w_gate.rows == ffn && weights.w_gate.cols == width)),
      "FFN weights disagree: w_up [{}, {}], w_down [{}, {}], w_gate [{}, {}]", ffn, width,
      weights.w_down.rows, weights.w_down.cols, weights.w_gate.rows, weights.w_gate.cols);
  TWELL_CHECK(x.cols == width && y.cols == width && x.rows == y.rows,
              "FFN of width {}: x is [{}, {}], y [{}, {}]", width, x.rows, x.cols, y.rows, y.cols);
  TWELL_CHECK(row_nnz.empty() || std::ssize(row_nnz) == x.rows,
              "row_nnz has {} entries for {} tokens", row_nnz.size(), x.rows);
}

}  // namespace

void ffn_forward(Context& ctx, const StoredFfnWeights& weights, ConstMatrixF x, MatrixF y,
                 FfnPlan& plan, std::span<int32_t> row_nnz) {
  check_shapes(weights, x, y, row_nnz);
  if (x.rows == 0) return;
  Arena::Scope scope(ctx.scratch());
  int32_t* counts = row_nnz.empty() ? scope.alloc<int32_t>(x.rows) : row_nnz.data();

  // Chunks of equal size, so that no small remainder streams all weights for a few tokens.
  const int64_t chunks = (x.rows + kFfnChunkTokens - 1) / kFfnChunkTokens;
  Outcome last;
  for (int64_t c = 0; c < chunks; ++c) {
    const int64_t begin = x.rows * c / chunks;
    const int64_t count = x.rows * (c + 1) / chunks - begin;
    const Chunk chunk{weights, x.slice_rows(begin, count), y.slice_rows(begin, count),
                      counts + begin};
    const bool dense = (!measures(plan.policy) && !named_execution(plan.policy).sparse) ||
                       !weights.activation.leaves_zeros() || weights.biased();
    last = dense ? run_dense(ctx, chunk) : run_packed(ctx, chunk, plan.policy);
  }
  plan.execution = last.execution;
  plan.reason = explain(plan.policy, weights, last.work);
  plan.tokens += x.rows;
  for (int64_t row = 0; row < x.rows; ++row) {
    plan.nnz += counts[row];
    plan.max_row_nnz = std::max<int64_t>(plan.max_row_nnz, counts[row]);
  }
}

}  // namespace twell
