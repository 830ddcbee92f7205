// SPDX-License-Identifier: Apache-2.0
// Log-probabilities of tokens under a model, for evaluation and tasks; scorer_cpu.h and
// scorer_cuda.h implement it.
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
  FfnPolicy ffn = FfnPolicy::kAuto;
  bool weights_in_bytes = false;  // projections in e4m3, on a GPU
};

struct ScoreBatch {
  std::span<const int32_t> ids;                // [M], the sequences one after the other
  std::span<const ForwardSequence> sequences;  // their tokens sum to M
  bool cached = false;               // they follow the tokens in their slots of the cache,
                                     // and are added to it; else each starts at position 0
  std::span<const int64_t> rows;     // [N] in [0, M): positions whose next token is scored
  std::span<const int32_t> targets;  // [N] in [0, V): these next tokens
  // When given, [L][M] out: active FFN neurons per layer and token.
  std::vector<std::vector<int32_t>>* row_nnz = nullptr;
  // When given, called layer after layer with the active neurons, a row per token [M].
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
  // How many batches from the first one on decide the executions of all later ones. With 0, a batch
  // gives the same bits whatever came before it.
  virtual int deciding_batches() const = 0;
  // Hash of the weights in the precision that is computed with.
  virtual std::string weights_hash() = 0;

  // An empty cache for `slots` sequences of up to `capacity` tokens, which replaces any before.
  virtual void make_cache(int64_t slots, int64_t capacity) = 0;
  virtual void set_length(int64_t slot, int64_t length) = 0;

  // losses [N] out: -log p(target | its sequence so far), nats. InputError when a sequence passes
  // the model's context or the cache's capacity, or, on a GPU, memory is short.
  virtual void score(const ScoreBatch& batch, std::span<float> losses) = 0;

 protected:
  Scorer() = default;
  void check(const ScoreBatch& batch, std::span<const float> losses) const {
    TWELL_CHECK(batch.rows.size() == batch.targets.size() && losses.size() == batch.rows.size(),
                "{} targets and {} losses for {} rows", batch.targets.size(), losses.size(),
                batch.rows.size());
    for (size_t i = 0; i < batch.rows.size(); ++i) {
      TWELL_CHECK(batch.rows[i] >= 0 && batch.rows[i] < std::ssize(batch.ids),
                  "row {} of a batch of {} tokens", batch.rows[i], batch.ids.size());
      TWELL_CHECK(batch.targets[i] >= 0 && batch.targets[i] < config().vocab_size,
                  "target {} in a vocabulary of {}", batch.targets[i], config().vocab_size);
    }
  }
};

}  // namespace twell
