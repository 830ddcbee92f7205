// SPDX-License-Identifier: Apache-2.0
// How likely a model finds the tokens of texts: what evaluation and tasks see of the difference
// between devices. scorer_cpu.h and scorer_cuda.h are the two.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "twell/format/statistics.h"
#include "twell/model/forward.h"

namespace twell {

// The largest work a scorer will be given, for planning memory.
struct ScorerPlan {
  int64_t tokens = 0;        // of a batch
  int64_t sequences = 0;     // of a batch
  int64_t length = 0;        // of a sequence with its past
  int64_t cache_tokens = 0;  // slots * capacity of the cache; 0: no cache
};

struct ScoreBatch {
  std::span<const int32_t> ids;                // [M], the sequences one after the other
  std::span<const ForwardSequence> sequences;  // their tokens sum to M
  bool cached = false;               // they continue what their slots of the cache hold, which
                                     // grow by them; else each starts at position 0
  std::span<const int64_t> rows;     // [N] in [0, M): the tokens behind which one is scored
  std::span<const int32_t> targets;  // [N] in [0, V): those that are scored
  // When given, [L][M] out: active FFN neurons per layer and token.
  std::vector<std::vector<int32_t>>* row_nnz = nullptr;
  // When given, called layer after layer with the neurons that fire, a row per token [M].
  std::function<void(int64_t layer, const Pattern& fired)> on_fired;
};

// Tokens per batch that keep a device busy.
inline constexpr int64_t kCpuBatchTokens = 2048;
inline constexpr int64_t kGpuBatchTokens = 16384;

class Scorer {
 public:
  virtual ~Scorer() = default;
  Scorer(const Scorer&) = delete;
  Scorer& operator=(const Scorer&) = delete;

  virtual const ModelConfig& config() const = 0;
  virtual FfnPolicy policy() const = 0;
  virtual int64_t good_batch() const = 0;  // tokens: one of the two above
  // Whether what the first batch does decides how the layers run from then on; if not, the same
  // batch gives the same bits whatever came before.
  virtual bool first_batch_decides() const = 0;
  // Hash of the weights, as rounded as they are computed with.
  virtual std::string weights_hash() = 0;

  // An empty cache for `slots` sequences of up to `capacity` tokens, in the place of any before.
  virtual void make_cache(int64_t slots, int64_t capacity) = 0;
  virtual void set_length(int64_t slot, int64_t length) = 0;

  // losses [N] out: -log p(target | its sequence so far), nats. InputError when a sequence passes
  // the model's context or the cache's capacity, or, on a GPU, memory is short.
  virtual void score(const ScoreBatch& batch, std::span<float> losses) = 0;

 protected:
  Scorer() = default;
  void check(const ScoreBatch& batch, std::span<const float> losses) const;
};

}  // namespace twell
