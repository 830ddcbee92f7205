// SPDX-License-Identifier: Apache-2.0
#include "twell/tasks/choice_scores.h"

#include <algorithm>

namespace twell {
namespace {

class Batch {
 public:
  Batch(Scorer& scorer, std::span<const ChoiceGroup> groups) : scorer_(scorer), groups_(groups) {
    int64_t longest = 0;
    for (const ChoiceGroup& group : groups) {
      longest = std::max(longest, group.tokens());
      scores_.emplace_back(group.continuations.size(), 0.0);
    }
    scorer_.make_cache(std::ssize(groups), longest);  // one slot per group
  }

  std::vector<std::vector<double>> run() {
    first_tokens();
    size_t most = 0;
    for (const ChoiceGroup& group : groups_) most = std::max(most, group.continuations.size());
    for (size_t choice = 0; choice < most; ++choice) further_tokens(choice);
    return std::move(scores_);
  }

 private:
  // Runs every context and scores the first token of each of its continuations.
  void first_tokens() {
    for (size_t g = 0; g < groups_.size(); ++g) {
      const ChoiceGroup& group = groups_[g];
      add_sequence(g, group.context);
      for (size_t choice = 0; choice < group.continuations.size(); ++choice) {
        score_behind(std::ssize(ids_) - 1, group.continuations[choice].front(), scores_[g][choice]);
      }
    }
    run_batch();
  }

  // Scores the other tokens of one continuation per group, overwriting the previous one's cache.
  void further_tokens(size_t choice) {
    for (size_t g = 0; g < groups_.size(); ++g) {
      const ChoiceGroup& group = groups_[g];
      if (choice >= group.continuations.size() || group.continuations[choice].size() < 2) continue;
      const std::vector<int32_t>& continuation = group.continuations[choice];
      const int64_t begin = std::ssize(ids_);
      add_sequence(g, std::span(continuation).first(continuation.size() - 1));
      for (size_t i = 1; i < continuation.size(); ++i) {
        score_behind(begin + static_cast<int64_t>(i) - 1, continuation[i], scores_[g][choice]);
      }
      scorer_.set_length(static_cast<int64_t>(g), std::ssize(group.context));
    }
    if (!ids_.empty()) run_batch();
  }

  void add_sequence(size_t group, std::span<const int32_t> ids) {
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    sequences_.push_back({.tokens = std::ssize(ids), .slot = static_cast<int64_t>(group)});
  }

  // Adds to score the log-likelihood of `target` as the token that follows that row of the batch.
  void score_behind(int64_t row, int32_t target, double& score) {
    rows_.push_back(row);
    targets_.push_back(target);
    receivers_.push_back(&score);
  }

  void run_batch() {
    std::vector<float> losses(rows_.size());
    scorer_.score(
        {.ids = ids_, .sequences = sequences_, .cached = true, .rows = rows_, .targets = targets_},
        losses);
    for (size_t i = 0; i < losses.size(); ++i) *receivers_[i] -= static_cast<double>(losses[i]);
    ids_.clear();
    sequences_.clear();
    rows_.clear();
    targets_.clear();
    receivers_.clear();
  }

  Scorer& scorer_;
  std::span<const ChoiceGroup> groups_;
  std::vector<std::vector<double>> scores_;
  // The batch under construction; receivers_ point to the scores that its losses are added to.
  std::vector<int32_t> ids_, targets_;
  std::vector<ForwardSequence> sequences_;
  std::vector<int64_t> rows_;
  std::vector<double*> receivers_;
};

}  // namespace

std::vector<std::vector<double>> continuation_scores(Scorer& scorer,
                                                     std::span<const ChoiceGroup> groups) {
  if (groups.empty()) return {};
  return Batch(scorer, groups).run();
}

}  // namespace twell
