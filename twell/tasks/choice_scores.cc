// SPDX-License-Identifier: Apache-2.0
#include "twell/tasks/choice_scores.h"

#include <algorithm>

#include "twell/base/buffer.h"
#include "twell/ops/cross_entropy/cross_entropy.h"

namespace twell {
namespace {

class Batch {
 public:
  Batch(Context& ctx, const Model& model, ForwardState& state, std::span<const ChoiceGroup> groups)
      : ctx_(ctx),
        model_(model),
        state_(state),
        groups_(groups),
        cache_(model.config, std::ssize(groups), capacity(groups)) {
    for (const ChoiceGroup& group : groups) scores_.emplace_back(group.continuations.size(), 0.0);
  }

  std::vector<std::vector<double>> run() {
    first_tokens();
    size_t most = 0;
    for (const ChoiceGroup& group : groups_) most = std::max(most, group.continuations.size());
    for (size_t choice = 0; choice < most; ++choice) further_tokens(choice);
    return std::move(scores_);
  }

 private:
  static int64_t capacity(std::span<const ChoiceGroup> groups) {
    int64_t longest = 0;
    for (const ChoiceGroup& group : groups) longest = std::max(longest, group.tokens());
    return longest;
  }

  // The contexts, and behind each the first token of all of its continuations.
  void first_tokens() {
    std::vector<int32_t> ids, targets;
    std::vector<ForwardSequence> sequences;
    for (size_t g = 0; g < groups_.size(); ++g) {
      const std::vector<int32_t>& context = groups_[g].context;
      ids.insert(ids.end(), context.begin(), context.end());
      sequences.push_back({.tokens = std::ssize(context), .slot = static_cast<int64_t>(g)});
      for (const auto& continuation : groups_[g].continuations) {
        targets.push_back(continuation.front());
      }
    }
    Arena::Scope scope(ctx_.scratch());
    const MatrixF hidden = run_forward(scope, ids, sequences);
    const MatrixF last = scope.matrix<float>(std::ssize(targets), model_.config.width);
    int64_t end = 0, row = 0;
    for (const ChoiceGroup& group : groups_) {
      end += std::ssize(group.context);
      for (size_t i = 0; i < group.continuations.size(); ++i) {
        std::copy_n(hidden.row(end - 1), hidden.cols, last.row(row++));
      }
    }
    const std::vector<float> losses = run_head(last, targets);
    size_t next = 0;
    for (std::vector<double>& scores : scores_) {
      for (double& score : scores) score -= static_cast<double>(losses[next++]);
    }
  }

  // The rest of one continuation of each group, in the place of the one before it.
  void further_tokens(size_t choice) {
    std::vector<int32_t> ids, targets;
    std::vector<ForwardSequence> sequences;
    for (size_t g = 0; g < groups_.size(); ++g) {
      const ChoiceGroup& group = groups_[g];
      if (choice >= group.continuations.size() || group.continuations[choice].size() < 2) continue;
      const std::vector<int32_t>& continuation = group.continuations[choice];
      ids.insert(ids.end(), continuation.begin(), continuation.end() - 1);
      targets.insert(targets.end(), continuation.begin() + 1, continuation.end());
      const auto slot = static_cast<int64_t>(g);
      sequences.push_back({.tokens = std::ssize(continuation) - 1, .slot = slot});
      cache_.set_length(slot, std::ssize(group.context));
    }
    if (ids.empty()) return;
    Arena::Scope scope(ctx_.scratch());
    const std::vector<float> losses = run_head(run_forward(scope, ids, sequences), targets);
    size_t next = 0;
    for (const ForwardSequence& sequence : sequences) {
      double& score = scores_[static_cast<size_t>(sequence.slot)][choice];
      for (int64_t i = 0; i < sequence.tokens; ++i) score -= static_cast<double>(losses[next++]);
    }
  }

  MatrixF run_forward(Arena::Scope& scope, std::span<const int32_t> ids,
                      std::span<const ForwardSequence> sequences) {
    const MatrixF hidden = scope.matrix<float>(std::ssize(ids), model_.config.width);
    forward(ctx_, model_, state_,
            {.ids = ids, .sequences = sequences, .cache = &cache_, .hidden = hidden});
    return hidden;
  }

  std::vector<float> run_head(ConstMatrixF hidden, std::span<const int32_t> targets) {
    std::vector<float> losses(targets.size());
    token_losses(ctx_, hidden, model_.weights.head, targets, losses);
    return losses;
  }

  Context& ctx_;
  const Model& model_;
  ForwardState& state_;
  std::span<const ChoiceGroup> groups_;
  KvCache cache_;  // a slot per group
  std::vector<std::vector<double>> scores_;
};

}  // namespace

std::vector<std::vector<double>> continuation_scores(Context& ctx, const Model& model,
                                                     ForwardState& state,
                                                     std::span<const ChoiceGroup> groups) {
  if (groups.empty()) return {};
  return Batch(ctx, model, state, groups).run();
}

}  // namespace twell
