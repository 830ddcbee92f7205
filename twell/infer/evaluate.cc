// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/evaluate.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "twell/base/error.h"

namespace twell {

int64_t LayerHistogram::tokens() const {
  return std::accumulate(tokens_with.begin(), tokens_with.end(), int64_t{0});
}

double LayerHistogram::mean() const {
  double active = 0.0;
  for (size_t n = 0; n < tokens_with.size(); ++n) {
    active += static_cast<double>(n) * static_cast<double>(tokens_with[n]);
  }
  const int64_t total = tokens();
  return total == 0 ? 0.0 : active / static_cast<double>(total);
}

int64_t LayerHistogram::max() const { return quantile(1.0); }

int64_t LayerHistogram::quantile(double quantile) const {
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

double Evaluation::mean_active() const {
  double sum = 0.0;
  for (const LayerHistogram& layer : layers) sum += layer.mean();
  return sum / static_cast<double>(layers.size());
}

Evaluator::Evaluator(Scorer& scorer, const EvaluateOptions& options)
    : scorer_(scorer),
      length_(options.length == 0 ? scorer.config().context : options.length),
      stride_(options.stride == 0 ? length_ : options.stride),
      batch_tokens_(options.batch_tokens == 0 ? scorer.good_batch() : options.batch_tokens),
      profiler_(options.profiler),
      document_end_(options.document_end) {
  const ModelConfig& config = scorer.config();
  TWELL_REQUIRE(length_ >= 1 && length_ <= config.context,
                "the window must be 1 to {} tokens (the model's context), got {}", config.context,
                length_);
  TWELL_REQUIRE(stride_ >= 1 && stride_ <= length_,
                "the stride must be 1 to {} tokens (the window), got {}", length_, stride_);
  TWELL_REQUIRE(batch_tokens_ >= 1, "the batch must be at least one token, got {}", batch_tokens_);
  result_.layers.resize(static_cast<size_t>(config.layers));
  for (LayerHistogram& layer : result_.layers) {
    layer.tokens_with.resize(static_cast<size_t>(config.ffn) + 1);
  }
}

ScorerPlan Evaluator::plan(const ModelConfig& config, const EvaluateOptions& options) {
  const int64_t length = options.length == 0 ? config.context : options.length;
  const int64_t batch = options.batch_tokens == 0 ? kGpuBatchTokens : options.batch_tokens;
  return {.tokens = std::max(batch, length),
          .sequences = std::max<int64_t>(batch / length, 1),
          .length = length};
}

void Evaluator::add(std::span<const int32_t> ids) {
  const int64_t last = std::ssize(ids) - 1;  // positions 0 .. last - 1 have a target
  for (int64_t scored = 0; scored < last;) {
    const int64_t end = std::min(last, scored == 0 ? length_ : scored + stride_);
    const int64_t begin = std::max<int64_t>(0, end - length_);
    if (!inputs_.empty() && std::ssize(inputs_) + end - begin > batch_tokens_) run_batch();
    int64_t cut = begin;
    for (int64_t i = begin; i < end; ++i) {
      const int32_t id = ids[static_cast<size_t>(i)];
      inputs_.push_back(id);
      targets_.push_back(i < scored ? -1 : ids[static_cast<size_t>(i) + 1]);
      if (i + 1 < end && (document_end_ < 0 || id != document_end_)) continue;
      windows_.push_back({.tokens = i + 1 - cut, .slot = 0});
      cut = i + 1;
    }
    scored = end;
  }
}

const Evaluation& Evaluator::finish() {
  if (!inputs_.empty()) run_batch();
  return result_;
}

void Evaluator::run_batch() {
  std::vector<int64_t> rows;
  std::vector<int32_t> targets;
  for (size_t i = 0; i < targets_.size(); ++i) {
    if (targets_[i] < 0) continue;
    rows.push_back(static_cast<int64_t>(i));
    targets.push_back(targets_[i]);
  }
  std::vector<std::vector<int32_t>> row_nnz;
  ScoreBatch batch{
      .ids = inputs_, .sequences = windows_, .rows = rows, .targets = targets, .row_nnz = &row_nnz};
  if (profiler_ != nullptr) {
    profiler_->begin_batch(inputs_, windows_, targets_);
    batch.on_fired = [this](int64_t layer, const Pattern& fired) {
      profiler_->add_layer(layer, fired);
    };
  }
  std::vector<float> losses(rows.size());
  scorer_.score(batch, losses);
  for (const float loss : losses) result_.loss_sum += static_cast<double>(loss);
  result_.tokens += std::ssize(losses);
  for (size_t layer = 0; layer < row_nnz.size(); ++layer) {
    // A token in several overlapping windows is counted only in the window that scores it.
    for (const int64_t row : rows) {
      const int32_t nnz = row_nnz[layer][static_cast<size_t>(row)];
      ++result_.layers[layer].tokens_with[static_cast<size_t>(nnz)];
    }
  }
  inputs_.clear();
  targets_.clear();
  windows_.clear();
}

}  // namespace twell
