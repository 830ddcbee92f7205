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
  int64_t length = 0;  // most tokens in a window; 0: the model's context
  // New tokens scored per window; 0: the length, so that windows do not overlap. With a smaller
  // stride, every token is scored with at least length - stride tokens of context.
  int64_t stride = 0;
  // Tokens per pass through the layers, at least one window; 0: chosen for the device.
  int64_t batch_tokens = 0;
  int32_t document_end = -1;  // nothing attends across this token, which ends a document; -1: none
  ActivityProfiler* profiler = nullptr;  // optional; receives every batch
};

// Active neurons per token of one layer, as a histogram.
struct LayerHistogram {
  std::vector<int64_t> tokens_with;  // [F + 1] tokens with exactly n active neurons, at index n

  int64_t tokens() const;
  double mean() const;
  int64_t max() const;
  // Smallest n such that at least a share `quantile` of the tokens has at most n active neurons.
  int64_t quantile(double quantile) const;
};

struct Evaluation {
  int64_t tokens = 0;     // number of scored tokens
  double loss_sum = 0.0;  // nats
  std::vector<LayerHistogram> layers;

  double cross_entropy() const;  // nats per token
  double perplexity() const;
  double bits_per_byte(int64_t text_bytes) const;
  double mean_active() const;  // neurons per token and layer
};

class Evaluator {
 public:
  // The scorer must outlive this object. InputError on impossible options.
  Evaluator(Scorer& scorer, const EvaluateOptions& options);
  // The plan of a scorer that supports these options.
  static ScorerPlan plan(const ModelConfig& config, const EvaluateOptions& options);

  // Scores ids[1..], each given the tokens before it; ids[0] is only context.
  void add(std::span<const int32_t> ids);
  // Runs the windows still waiting for a full batch and returns the result.
  const Evaluation& finish();
  const Evaluation& so_far() const { return result_; }

 private:
  void run_batch();

  Scorer& scorer_;
  int64_t length_, stride_, batch_tokens_;
  ActivityProfiler* profiler_;
  int32_t document_end_;
  std::vector<int32_t> inputs_;
  std::vector<int32_t> targets_;          // -1: context only, scored in another window
  std::vector<ForwardSequence> windows_;  // or the documents in them
  Evaluation result_;
};

}  // namespace twell
