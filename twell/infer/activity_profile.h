// SPDX-License-Identifier: Apache-2.0
// Activity of a model's feed-forward layers on a text, as far as it decides the benefit of
// sparsity: neurons that are never active, the overlap of neighbouring tokens, activity by position
// and by token, and the speed-up that the cost model of the executions expects.
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
  std::vector<int64_t> fired;   // [F] number of tokens on which each neuron was active
  std::vector<int64_t> nnz_at;  // [context] active neurons summed over all tokens at a position
  // Sums over whole tiles of 64 and 128 consecutive tokens of the neurons active on any of them.
  int64_t union_64 = 0, tiles_64 = 0;
  int64_t union_128 = 0, tiles_128 = 0;
  ExpectedFfn prompt;  // of the batches profiled
  ExpectedFfn decode;  // one token at a time

  int64_t never_fired() const;
  double mean_union_64() const;  // 0 without a whole tile
  double mean_union_128() const;
};

struct TokenActivity {
  int64_t seen = 0;
  int64_t nnz = 0;  // active neurons, summed over layers and occurrences
};

// A range of positions: 0, 1, 2-3, 4-7, ...
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

  ExpectedFfn sum(ExpectedFfn LayerProfile::*expected) const;  // over all layers
  ExpectedFfn prompt() const { return sum(&LayerProfile::prompt); }
  ExpectedFfn decode() const { return sum(&LayerProfile::decode); }
  std::vector<PositionRange> positions() const;
  // Ids of up to `count` tokens, sorted by activity, most or least active first. Considers only
  // tokens seen at least five times if there are at least 2 * count of them.
  std::vector<int32_t> extreme_tokens(int64_t count, bool most) const;
  double nnz_of(int32_t token) const;  // mean per layer and occurrence
};

class ActivityProfiler {
 public:
  // costs: for the device whose speed-ups are reported. InputError when the activation has no
  // zeros.
  ActivityProfiler(const ModelConfig& config, std::unique_ptr<ExecutionCosts> costs);

  // Call begin_batch before a batch goes through the layers (each sequence starts at position 0),
  // then once per layer pass the active neurons, one row per token. A token without a target (-1)
  // is context that is scored in another window; it counts only in unions and expected executions.
  void begin_batch(std::span<const int32_t> ids, std::span<const ForwardSequence> sequences,
                   std::span<const int32_t> targets);
  void add_layer(int64_t layer, const Pattern& fired);

  const ActivityProfile& profile() const { return profile_; }
  const ExecutionCosts& costs() const { return *costs_; }

 private:
  std::unique_ptr<ExecutionCosts> costs_;
  ActivityProfile profile_;
  std::vector<int32_t> ids_;        // of the current batch
  std::vector<int64_t> positions_;  // of its tokens; -1: context only
};

}  // namespace twell
