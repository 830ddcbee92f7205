// SPDX-License-Identifier: Apache-2.0
// What the feed-forward layers of a model do on a text, in the terms that decide what sparsity is
// worth: which neurons never fire, what neighbouring tokens share, where in a sequence and on which
// tokens activity sits, and what the cost model of the executions makes of it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "twell/format/statistics.h"
#include "twell/infer/expected_ffn.h"
#include "twell/model/forward.h"

namespace twell {

struct LayerProfile {
  std::vector<int64_t> fired;   // [F] tokens on which each neuron was active
  std::vector<int64_t> nnz_at;  // [context] active neurons of all tokens at a position
  // Neurons active somewhere in a tile of 64 and of 128 consecutive tokens, over whole tiles.
  int64_t union_64 = 0, tiles_64 = 0;
  int64_t union_128 = 0, tiles_128 = 0;
  ExpectedFfn prompt;  // of the batches seen
  ExpectedFfn decode;  // a token at a time

  int64_t never_fired() const;
  double mean_union_64() const;  // 0 without a whole tile
  double mean_union_128() const;
};

struct TokenActivity {
  int64_t seen = 0;
  int64_t nnz = 0;  // active neurons, over all layers
};

// A run of positions: 0, 1, 2-3, 4-7, ...
struct PositionRange {
  int64_t first = 0, last = 0;
  int64_t tokens = 0;
  std::vector<double> nnz;  // [L] mean active neurons
};

struct ActivityProfile {
  int64_t tokens = 0;
  std::vector<LayerProfile> layers;
  std::vector<int64_t> tokens_at;       // [context]
  std::vector<TokenActivity> by_token;  // [V]

  ExpectedFfn prompt() const;  // of all layers together
  ExpectedFfn decode() const;
  std::vector<PositionRange> positions() const;
  // Ids of at most `count` tokens, the most active first or the least active first. Of those seen
  // at least five times when these are at least 2 * count, else of all that were seen.
  std::vector<int32_t> extreme_tokens(int64_t count, bool most) const;
  double nnz_of(int32_t token) const;  // mean per layer and occurrence
};

class ActivityProfiler {
 public:
  // Costs: of the device that the figures are for. InputError when the activation leaves no zeros.
  ActivityProfiler(const ModelConfig& config, std::unique_ptr<ExecutionCosts> costs);

  // A batch that is about to go through the layers, each sequence from position 0; then each layer:
  // the neurons that fire, a row per token. A token without a target (-1) is context that counts
  // elsewhere: it is part of unions and of what executions are expected to run, and of nothing
  // else.
  void begin_batch(std::span<const int32_t> ids, std::span<const ForwardSequence> sequences,
                   std::span<const int32_t> targets);
  void add_layer(int64_t layer, const Pattern& fired);

  const ActivityProfile& profile() const { return profile_; }
  const ExecutionCosts& costs() const { return *costs_; }

 private:
  std::unique_ptr<ExecutionCosts> costs_;
  ActivityProfile profile_;
  std::vector<int32_t> ids_;        // of the batch
  std::vector<int64_t> positions_;  // of its tokens; -1: does not count
};

}  // namespace twell
