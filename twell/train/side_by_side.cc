// SPDX-License-Identifier: Apache-2.0
#include "twell/train/side_by_side.h"

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <vector>

#include "twell/data/batch_sampler.h"
#include "twell/train/validation.h"

namespace twell {
namespace {

constexpr int kPasses = 5;  // timed passes of each model, alternating
constexpr int64_t kTimedSequences = 8;

// Sequences of a batch that keeps the scorer's device busy.
int64_t sequences_of_batch(int64_t batch_tokens, int64_t length) {
  return std::max<int64_t>(1, batch_tokens / length);
}

// Times repeated passes of one model over the timed tokens.
class Runner {
 public:
  Runner(Scorer& scorer, const std::vector<int32_t>& ids, int64_t length)
      : scorer_(scorer),
        ids_(ids),
        sequences_(ids.size() / static_cast<size_t>(length), {.tokens = length}) {
    // The first pass allocates memory, and like those that decide on executions it is not timed.
    const ModelConfig& config = scorer.config();
    std::vector<std::vector<int32_t>> row_nnz;
    const bool counts = leaves_zeros(config.activation);
    for (int i = 0; i <= scorer.deciding_batches(); ++i) run(counts ? &row_nnz : nullptr);
    for (const std::vector<int32_t>& layer : row_nnz) {
      for (const int32_t nnz : layer) active_ += nnz;
    }
    active_ /= static_cast<double>(std::ssize(ids) * config.layers);
    if (!counts) active_ = static_cast<double>(config.ffn);
  }

  void pass() {
    const auto start = std::chrono::steady_clock::now();
    run(nullptr);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    seconds_.push_back(elapsed.count());
  }

  ModelFigures figures(double ce) {
    std::sort(seconds_.begin(), seconds_.end());
    return {.ce = ce,
            .active_per_token = active_,
            .active_share = active_ / static_cast<double>(scorer_.config().ffn),
            .tokens_per_second = static_cast<double>(ids_.size()) / seconds_[seconds_.size() / 2]};
  }

 private:
  // Scores one token, so that nearly all of the time goes into the layers.
  void run(std::vector<std::vector<int32_t>>* row_nnz) {
    const int64_t row = 0;
    float loss = 0.0F;
    scorer_.score({.ids = ids_,
                   .sequences = sequences_,
                   .rows = {&row, 1},
                   .targets = {ids_.data(), 1},
                   .row_nnz = row_nnz},
                  {&loss, 1});
  }

  Scorer& scorer_;
  const std::vector<int32_t>& ids_;
  std::vector<ForwardSequence> sequences_;
  double active_ = 0.0;  // per token and layer
  std::vector<double> seconds_;
};

// On the run's held-out tokens, in batches that keep the scorer's device busy.
double held_out_cross_entropy(Scorer& scorer, const TrainingData& data, ValidationOptions options) {
  options.micro_batch = sequences_of_batch(scorer.good_batch(), options.length);
  return validation_cross_entropy(scorer, data, options);
}

nlohmann::json figures_json(const ModelFigures& figures) {
  return {{"ce", figures.ce},
          {"active_per_token", figures.active_per_token},
          {"active_share", figures.active_share},
          {"tokens_per_s", figures.tokens_per_second}};
}

}  // namespace

SideBySide compare_side_by_side(Scorer& original, Scorer& sparse, const TrainingData& data,
                                const ValidationOptions& options) {
  const BatchSampler sampler(data, Split::kValidation, options.length, 0, false);
  const int64_t timed = std::min(kTimedSequences, sampler.windows());
  const size_t length = static_cast<size_t>(options.length);
  std::vector<int32_t> ids(static_cast<size_t>(timed) * length), targets(length);
  for (int64_t i = 0; i < timed; ++i) {
    sampler.sequence(i, std::span(ids).subspan(static_cast<size_t>(i) * length, length), targets);
  }
  Runner first(original, ids, options.length), second(sparse, ids, options.length);
  for (int pass = 0; pass < kPasses; ++pass) {
    first.pass();
    second.pass();
  }
  SideBySide out;
  out.original = first.figures(held_out_cross_entropy(original, data, options));
  out.sparse = second.figures(held_out_cross_entropy(sparse, data, options));
  out.validation_sequences = std::min(options.sequences, sampler.windows());
  out.timed_tokens = std::ssize(ids);
  return out;
}

ScorerPlan side_by_side_plan(const ValidationOptions& options) {
  const int64_t sequences =
      std::max(kTimedSequences, sequences_of_batch(kGpuBatchTokens, options.length));
  return {.tokens = sequences * options.length, .sequences = sequences, .length = options.length};
}

nlohmann::json side_by_side_json(const SideBySide& figures) {
  return {{"original", figures_json(figures.original)},
          {"sparse", figures_json(figures.sparse)},
          {"ce_ratio", figures.sparse.ce / figures.original.ce},
          {"speedup", figures.sparse.tokens_per_second / figures.original.tokens_per_second},
          {"validation_sequences", figures.validation_sequences},
          {"timed_tokens", figures.timed_tokens}};
}

}  // namespace twell
