// SPDX-License-Identifier: Apache-2.0
// The captured graphs of a session's decode steps, one for each kind of step. A graph contains the
// executions that were chosen when it was captured, so it is dropped when they may have changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace twell {

// Key: what tells kinds of steps apart. Graph: default-constructed before its capture.
template <typename Key, typename Graph>
class StepGraphs {
 public:
  // Keeps at most `most` graphs (at least one).
  explicit StepGraphs(size_t most) : most_(most) {}

  // The graph of this kind of step, a new one where there is none. `revision` is the number of
  // updates that the choice of executions has had; graphs of another revision are dropped. Valid
  // until the next call.
  Graph& at(const Key& key, int64_t revision) {
    const bool full = graphs_.size() >= most_ && !graphs_.contains(key);
    if (revision != revision_ || full) graphs_.clear();
    revision_ = revision;
    return graphs_[key];
  }

 private:
  size_t most_;
  int64_t revision_ = 0;
  std::map<Key, Graph> graphs_;
};

}  // namespace twell
