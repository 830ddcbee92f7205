// SPDX-License-Identifier: Apache-2.0
#include "twell/model/scorer_cpu.h"

#include <algorithm>

#include "twell/base/content_hash.h"
#include "twell/base/error.h"
#include "twell/ops/cross_entropy/cross_entropy.h"
#include "twell/ops/ffn/gate/gate_gemm.h"

namespace twell {
namespace {

// Finds the active neurons for x [M, D], one chunk of tokens at a time.
Pattern fired_neurons(Context& ctx, const StoredFfnWeights& weights, ConstMatrixF x) {
  Pattern out{.cols = weights.ffn(), .row_begin = {0}, .column = {}};
  for (int64_t begin = 0; begin < x.rows; begin += kFfnChunkTokens) {
    const ConstMatrixF chunk = x.slice_rows(begin, std::min(kFfnChunkTokens, x.rows - begin));
    Arena::Scope scope(ctx.scratch());
    const TwellWide gate = alloc_twell_wide(scope, {.rows = chunk.rows, .cols = weights.ffn()});
    gate_gemm(ctx, {.x = chunk, .weight = weights.firing(), .out = gate});
    append_rows(pattern_from_twell(gate), out);
  }
  return out;
}

}  // namespace

ScorerCpu::ScorerCpu(Context& ctx, const ModelView& model, FfnPolicy policy)
    : ctx_(ctx), model_(model), policy_(policy), state_(model.config, policy) {}

std::string ScorerCpu::weights_hash() {
  constexpr int64_t kPiece = 1 << 16;
  ContentHash hash;
  std::vector<float> values(kPiece);
  const std::vector<ParamSpec> table = parameter_table(model_.config);
  for (size_t i = 0; i < table.size(); ++i) {
    const WeightMatrix& parameter = model_.parameters[i];
    const int64_t size = parameter.rows * parameter.cols;
    if (parameter.scales != nullptr) {
      const int64_t outputs = table[i].transposed ? parameter.cols : parameter.rows;
      hash.add_bytes(std::as_bytes(std::span(parameter.scales, static_cast<size_t>(outputs))));
    }
    for (int64_t begin = 0; begin < size; begin += kPiece) {
      const int64_t count = std::min(kPiece, size - begin);
      widen(parameter.at(0, begin), parameter.dtype, count, values.data());
      hash.add_bytes(std::as_bytes(std::span(values).first(static_cast<size_t>(count))));
    }
  }
  return hash.digest();
}

void ScorerCpu::make_cache(int64_t slots, int64_t capacity) {
  cache_.reset();
  cache_.emplace(model_.config, slots, capacity);
}

void ScorerCpu::score(const ScoreBatch& batch, std::span<float> losses) {
  check(batch, losses);
  Arena::Scope scope(ctx_.scratch());
  const int64_t width = model_.config.width;
  const MatrixF hidden = scope.matrix<float>(std::ssize(batch.ids), width);
  Forward problem{.ids = batch.ids,
                  .sequences = batch.sequences,
                  .cache = batch.cached ? &cache_.value() : nullptr,
                  .hidden = hidden,
                  .row_nnz = batch.row_nnz};
  if (batch.on_fired) {
    problem.on_stage = [&](int64_t layer, LayerStage stage, ConstMatrixF x) {
      if (stage != LayerStage::kFfnNorm) return;
      const StoredFfnWeights& weights = model_.stored.layers[static_cast<size_t>(layer)].ffn;
      batch.on_fired(layer, fired_neurons(ctx_, weights, x));
    };
  }
  forward(ctx_, model_, state_, problem);
  const MatrixF scored = scope.matrix<float>(std::ssize(batch.rows), width);
  for (size_t i = 0; i < batch.rows.size(); ++i) {
    std::copy_n(hidden.row(batch.rows[i]), width, scored.row(static_cast<int64_t>(i)));
  }
  token_losses(ctx_, scored, model_.stored.head, batch.targets, losses);
}

}  // namespace twell
