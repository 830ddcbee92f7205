// SPDX-License-Identifier: Apache-2.0
#include "twell/train/side_by_side.h"

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <vector>

#include "twell/data/batch_sampler.h"
#include "twell/model/forward.h"

namespace twell {
namespace {

constexpr int kPasses = 5;  // timed passes of each model, alternating
constexpr int64_t kTimedSequences = 8;

// Times repeated passes of one model over the timed tokens.
class Runner {
 public:
  Runner(Context& ctx, const Model& model, const std::vector<int32_t>& ids, int64_t length)
      : ctx_(ctx),
        model_(model),
        ids_(ids),
        sequences_(ids.size() / static_cast<size_t>(length), {.tokens = length}),
        state_(model.config, FfnPolicy::kAuto),
        hidden_(std::ssize(ids) * model.config.width) {
    pass();  // not timed, because it allocates memory and makes plans
    seconds_.clear();
  }

  void pass() {
    const auto start = std::chrono::steady_clock::now();
    forward(ctx_, model_, state_,
            {.ids = ids_,
             .sequences = sequences_,
             .hidden = hidden_.matrix(std::ssize(ids_), model_.config.width)});
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    seconds_.push_back(elapsed.count());
  }

  ModelFigures figures(double ce) {
    ModelFigures out{.ce = ce};
    for (const FfnPlan& plan : state_.ffn_plans) out.active_per_token += plan.nnz_per_token();
    out.active_per_token /= static_cast<double>(model_.config.layers);
    out.active_share = out.active_per_token / static_cast<double>(model_.config.ffn);
    std::sort(seconds_.begin(), seconds_.end());
    out.tokens_per_second = static_cast<double>(ids_.size()) / seconds_[seconds_.size() / 2];
    return out;
  }

 private:
  Context& ctx_;
  const Model& model_;
  const std::vector<int32_t>& ids_;
  std::vector<ForwardSequence> sequences_;
  ForwardState state_;
  Buffer<float> hidden_;
  std::vector<double> seconds_;
};

nlohmann::json figures_json(const ModelFigures& figures) {
  return {{"ce", figures.ce},
          {"active_per_token", figures.active_per_token},
          {"active_share", figures.active_share},
          {"tokens_per_s", figures.tokens_per_second}};
}

}  // namespace

SideBySide compare_side_by_side(Context& ctx, const Model& original, const Model& sparse,
                                const TrainingData& data, const ValidationOptions& options) {
  const BatchSampler sampler(data, Split::kValidation, options.length, 0, false);
  const int64_t timed = std::min(kTimedSequences, sampler.windows());
  const size_t length = static_cast<size_t>(options.length);
  std::vector<int32_t> ids(static_cast<size_t>(timed) * length), targets(length);
  for (int64_t i = 0; i < timed; ++i) {
    sampler.sequence(i, std::span(ids).subspan(static_cast<size_t>(i) * length, length), targets);
  }
  Runner first(ctx, original, ids, options.length), second(ctx, sparse, ids, options.length);
  for (int pass = 0; pass < kPasses; ++pass) {
    first.pass();
    second.pass();
  }
  SideBySide out;
  out.original = first.figures(validation_cross_entropy(ctx, original, data, options));
  out.sparse = second.figures(validation_cross_entropy(ctx, sparse, data, options));
  out.validation_sequences = std::min(options.sequences, sampler.windows());
  out.timed_tokens = std::ssize(ids);
  return out;
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
