// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/evaluate.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "twell/base/error.h"
#include "twell/ops/cross_entropy/cross_entropy.h"

namespace twell {

int64_t LayerActivity::tokens() const {
  return std::accumulate(tokens_with.begin(), tokens_with.end(), int64_t{0});
}

double LayerActivity::mean() const {
  double active = 0.0;
  for (size_t n = 0; n < tokens_with.size(); ++n) {
    active += static_cast<double>(n) * static_cast<double>(tokens_with[n]);
  }
  const int64_t total = tokens();
  return total == 0 ? 0.0 : active / static_cast<double>(total);
}

int64_t LayerActivity::max() const { return quantile(1.0); }

int64_t LayerActivity::quantile(double quantile) const {
  const double wanted = quantile * static_cast<double>(tokens());
  double seen = 0.0;
  for (size_t n = 0; n < tokens_with.size(); ++n) {
    seen += static_cast<double>(tokens_with[n]);
    if (seen >= wanted && seen > 0.0) return static_cast<int64_t>(n);
  }
  return 0;
}

double Evaluation::cross_entropy() const { return loss_sum / static_cast<double>(tokens); }

double Evaluation::perplexity() const { return std::exp(cross_entropy()); }

double Evaluation::bits_per_byte(int64_t text_bytes) const {
  return loss_sum / std::numbers::ln2 / static_cast<double>(text_bytes);
}

Evaluator::Evaluator(Context& ctx, const Model& model, const EvaluateOptions& options)
    : ctx_(ctx),
      model_(model),
      length_(options.length == 0 ? model.config.context : options.length),
      stride_(options.stride == 0 ? length_ : options.stride),
      batch_tokens_(options.batch_tokens),
      profiler_(options.profiler),
      state_(model.config, options.ffn) {
  TWELL_REQUIRE(length_ >= 1 && length_ <= model.config.context,
                "the window must be 1 to {} tokens (the model's context), got {}",
                model.config.context, length_);
  TWELL_REQUIRE(stride_ >= 1 && stride_ <= length_,
                "the stride must be 1 to {} tokens (the window), got {}", length_, stride_);
  TWELL_REQUIRE(batch_tokens_ >= 1, "the batch must be at least one token, got {}", batch_tokens_);
  result_.layers.resize(static_cast<size_t>(model.config.layers));
  for (LayerActivity& layer : result_.layers) {
    layer.tokens_with.resize(static_cast<size_t>(model.config.ffn) + 1);
  }
}

void Evaluator::add(std::span<const int32_t> ids) {
  const int64_t last = std::ssize(ids) - 1;  // positions 0 .. last - 1 have a target
  for (int64_t scored = 0; scored < last;) {
    const int64_t end = std::min(last, scored == 0 ? length_ : scored + stride_);
    const int64_t begin = std::max<int64_t>(0, end - length_);
    if (!inputs_.empty() && std::ssize(inputs_) + end - begin > batch_tokens_) run_batch();
    for (int64_t i = begin; i < end; ++i) {
      inputs_.push_back(ids[static_cast<size_t>(i)]);
      targets_.push_back(i < scored ? -1 : ids[static_cast<size_t>(i) + 1]);
    }
    windows_.push_back({.tokens = end - begin, .slot = 0});
    scored = end;
  }
}

const Evaluation& Evaluator::finish() {
  if (!inputs_.empty()) run_batch();
  return result_;
}

void Evaluator::run_batch() {
  const int64_t tokens = std::ssize(inputs_);
  Arena::Scope scratch(ctx_.scratch());
  const MatrixF hidden = scratch.matrix<float>(tokens, model_.config.width);
  std::vector<std::vector<int32_t>> row_nnz(result_.layers.size());
  for (auto& layer : row_nnz) layer.resize(inputs_.size());
  Forward problem{.ids = inputs_, .sequences = windows_, .hidden = hidden, .row_nnz = &row_nnz};
  if (profiler_ != nullptr) {
    profiler_->begin_batch(inputs_, windows_, targets_);
    problem.on_ffn_input = [this](int64_t layer, ConstMatrixF x) {
      profiler_->add_layer(layer, x);
    };
  }
  forward(ctx_, model_, state_, problem);
  const CrossEntropyResult loss =
      cross_entropy(ctx_, {.x = hidden, .weight = model_.weights.head, .targets = targets_});
  result_.loss_sum += loss.loss_sum;
  result_.tokens += loss.tokens;
  for (size_t layer = 0; layer < row_nnz.size(); ++layer) {
    for (size_t i = 0; i < targets_.size(); ++i) {
      // A token that overlapping windows see more than once counts where it is scored.
      if (targets_[i] < 0) continue;
      ++result_.layers[layer].tokens_with[static_cast<size_t>(row_nnz[layer][i])];
    }
  }
  inputs_.clear();
  targets_.clear();
  windows_.clear();
}

}  // namespace twell
