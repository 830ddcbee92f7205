// SPDX-License-Identifier: Apache-2.0
// The cross-entropy of a model on a text, and the activity of its feed-forward layers.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "twell/infer/activity_profile.h"
#include "twell/model/scorer.h"

namespace twell {

struct EvaluateOptions {
  int64_t length = 0;  // tokens a window sees at most; 0: the model's context
  // New tokens scored per window; 0: the length, so that windows do not overlap. With fewer, every
  // token is scored after at least length - stride others.
  int64_t stride = 0;
  // Tokens that go through the layers together, at least one window; 0: chosen for the device.
  int64_t batch_tokens = 0;
  ActivityProfiler* profiler = nullptr;  // when given, sees every batch
};

// Active neurons per token of one layer, as a histogram.
struct LayerHistogram {
  std::vector<int64_t> tokens_with;  // [F + 1]: tokens with exactly n active neurons

  int64_t tokens() const;
  double mean() const;
  int64_t max() const;
  // Smallest n such that a share of at least `quantile` of the tokens has at most n.
  int64_t quantile(double quantile) const;
};

struct Evaluation {
  int64_t tokens = 0;     // scored
  double loss_sum = 0.0;  // nats
  std::vector<LayerHistogram> layers;

  double cross_entropy() const;  // nats per token
  double perplexity() const;
  double bits_per_byte(int64_t text_bytes) const;
};

class Evaluator {
 public:
  // The scorer must outlive it. InputError on impossible options.
  Evaluator(Scorer& scorer, const EvaluateOptions& options);
  // The plan of a scorer for these options.
  static ScorerPlan plan(const ModelConfig& config, const EvaluateOptions& options);

  // Scores ids[1..], each after those before it; ids[0] is context only.
  void add(std::span<const int32_t> ids);
  // Runs the windows that wait for a full batch, and returns the result.
  const Evaluation& finish();
  const Evaluation& so_far() const { return result_; }

 private:
  void run_batch();

  Scorer& scorer_;
  int64_t length_, stride_, batch_tokens_;
  ActivityProfiler* profiler_;
  std::vector<int32_t> inputs_;
  std::vector<int32_t> targets_;  // -1: seen as context, scored elsewhere
  std::vector<ForwardSequence> windows_;
  Evaluation result_;
};

}  // namespace twell
