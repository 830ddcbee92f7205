// SPDX-License-Identifier: Apache-2.0
#include "bench/synthetic_model.h"

#include <algorithm>
#include <cmath>

namespace twell {
namespace {

// On inputs of unit size, gates are normal with a standard deviation of init_std * sqrt(D). A bias
// of -2.58 standard deviations leaves 0.5% of them active.
constexpr double kActiveBeyond = 2.58;
// Keeps the layers' outputs small compared to the unit-size embeddings, so that all layers see
// nearly the same input.
constexpr float kOutputScale = 0.05f;

}  // namespace

std::unique_ptr<Model> synthetic_model(Context& ctx, const ModelConfig& config, uint64_t seed) {
  auto model = std::make_unique<Model>(config);
  init_weights(ctx, *model, seed);
  const double width = static_cast<double>(config.width);
  // The norm turns the constant c into c / sqrt(1 + c^2 / D).
  const double wanted = kActiveBeyond * config.init_std * std::sqrt(width) / -kSyntheticBias;
  const double constant = wanted / std::sqrt(std::max(1e-3, 1.0 - wanted * wanted / width));
  for (const ParamSpec& spec : model->table) {
    const MatrixF values(model->flat.data() + spec.offset, spec.rows, spec.cols);
    const bool output = spec.name.ends_with("o_proj.weight");
    const bool down = spec.name.ends_with("down_proj.weight");
    const bool embedding = spec.name.ends_with("embed_tokens.weight");
    if (!output && !down && !embedding) continue;
    const float scale = embedding ? 1.0f / static_cast<float>(config.init_std) : kOutputScale;
    ctx.parallel_for(values.rows, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t col = 0; col < values.cols; ++col) values(row, col) *= scale;
        if (embedding) values(row, 0) = static_cast<float>(constant);
        if (down || (output && row == 0)) values(row, 0) = 0.0f;
      }
    });
    // Layers must not write to the constant component: row 0 of o_proj, column 0 of down_proj [F,
    // D].
    if (output) std::fill_n(values.row(0), values.cols, 0.0f);
  }
  set_synthetic_sparsity(*model, false);
  return model;
}

void set_synthetic_sparsity(Model& model, bool sparse) {
  for (const LayerMatrices<float>& layer :
       model_matrices<float>(model.config, model.flat.data()).layers) {
    const MatrixF firing = layer.ffn.firing();
    for (int64_t row = 0; row < firing.rows; ++row) firing(row, 0) = sparse ? kSyntheticBias : 0.0f;
  }
}

}  // namespace twell
