// SPDX-License-Identifier: Apache-2.0
#include "twell/model/layer_dump.h"

#include <cmath>
#include <utility>

#include "twell/base/error.h"
#include "twell/model/forward.h"
#include "twell/ops/activation/activation_rows.h"
#include "twell/ops/bias/bias.h"
#include "twell/ops/matmul/matmul.h"

namespace twell {
namespace {

const char* stage_name(LayerStage stage) {
  switch (stage) {
    case LayerStage::kInput:
      return "input";
    case LayerStage::kAttentionNorm:
      return "attention_norm";
    case LayerStage::kQkv:
      return "qkv";
    case LayerStage::kAttention:
      return "attention";
    case LayerStage::kAfterAttention:
      return "after_attention";
    case LayerStage::kFfnNorm:
      return "ffn_norm";
    case LayerStage::kFfn:
      return "ffn";
  }
  return "";
}

std::vector<float> packed_values(ConstMatrixF matrix) {
  std::vector<float> values;
  values.reserve(static_cast<size_t>(matrix.rows * matrix.cols));
  for (int64_t row = 0; row < matrix.rows; ++row) {
    values.insert(values.end(), matrix.row(row), matrix.row(row) + matrix.cols);
  }
  return values;
}

// x w^T + bias
std::vector<float> projected(Context& ctx, ConstMatrixF x, const WeightMatrix& w,
                             const float* bias) {
  Arena::Scope scope(ctx.scratch());
  const MatrixF y = scope.matrix<float>(x.rows, w.rows);
  linear_forward(ctx, x, w, y);
  if (bias != nullptr) bias_forward(ctx, bias, y);
  return packed_values(y);
}

}  // namespace

void check_layer_dump(const ModelConfig& config, std::span<const int32_t> ids, int64_t layer) {
  TWELL_REQUIRE(layer >= 0 && layer < config.layers, "layer {} of a model with layers 0 to {}",
                layer, config.layers - 1);
  TWELL_REQUIRE(!ids.empty(), "the prompt is empty: no token to run the layer on");
  TWELL_REQUIRE(std::ssize(ids) <= config.context,
                "the prompt has {} tokens, and the model's context {}", ids.size(), config.context);
  for (const int32_t id : ids) {
    TWELL_REQUIRE(id >= 0 && id < config.vocab_size, "token id {} is outside the vocabulary of {}",
                  id, config.vocab_size);
  }
}

void add_hidden_stages(const BlendedActivation& activation, std::vector<float> gate,
                       std::vector<float> up, int64_t ffn, LayerDump& dump) {
  const bool gated = !gate.empty();
  std::vector<float> hidden(up.size());
  for (size_t row = 0; row < up.size(); row += static_cast<size_t>(ffn)) {
    const float* const product = gated ? gate.data() + row : up.data() + row;
    activate_row(activation, product, gated ? up.data() + row : nullptr, hidden.data() + row,
                 nullptr, ffn);
    if (!gated) continue;
    activate_row(activation, product, nullptr, gate.data() + row, nullptr, ffn);
  }
  if (gated) dump.stages.push_back({"gate", ffn, std::move(gate)});
  dump.stages.push_back({"up", ffn, std::move(up)});
  dump.stages.push_back({"hidden", ffn, std::move(hidden)});
}

LayerDump dump_layer(Context& ctx, const ModelView& model, std::span<const int32_t> ids,
                     int64_t layer, FfnPolicy policy) {
  check_layer_dump(model.config, ids, layer);
  LayerDump dump;
  ForwardState state(model.config, policy);
  Arena::Scope scope(ctx.scratch());
  const ForwardSequence sequence{.tokens = std::ssize(ids)};
  const StoredFfnWeights& ffn = model.stored.layers[static_cast<size_t>(layer)].ffn;
  Forward problem{.ids = ids,
                  .sequences = {&sequence, 1},
                  .hidden = scope.matrix<float>(std::ssize(ids), model.config.width)};
  problem.on_stage = [&](int64_t of, LayerStage stage, ConstMatrixF values) {
    if (of != layer) return;
    dump.stages.push_back({stage_name(stage), values.cols, packed_values(values)});
    if (stage != LayerStage::kFfnNorm) return;
    std::vector<float> gate;
    if (ffn.gated()) gate = projected(ctx, values, ffn.w_gate, ffn.b_gate);
    add_hidden_stages(ffn.activation, std::move(gate), projected(ctx, values, ffn.w_up, ffn.b_up),
                      ffn.ffn(), dump);
  };
  forward(ctx, model, state, problem);
  std::vector<float> output;
  for (const DumpedStage& stage : dump.stages) {
    if (stage.name == stage_name(LayerStage::kAfterAttention)) output = stage.values;
  }
  const std::vector<float>& added = dump.stages.back().values;
  for (size_t i = 0; i < output.size(); ++i) output[i] += added[i];
  dump.stages.push_back({"output", model.config.width, std::move(output)});
  dump.execution = state.ffn_plans[static_cast<size_t>(layer)].execution.name;
  return dump;
}

double relative_difference(std::span<const float> a, std::span<const float> b) {
  TWELL_CHECK(a.size() == b.size(), "{} values against {}", a.size(), b.size());
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = double{a[i]} - double{b[i]};
    difference += d * d;
    norm += double{b[i]} * double{b[i]};
  }
  return difference == 0.0 ? 0.0 : std::sqrt(difference / norm);
}

}  // namespace twell
