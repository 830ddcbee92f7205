// SPDX-License-Identifier: Apache-2.0
// The activity of the feed-forward layers over one optimizer step: statistics summed over its
// micro-batches, which neurons were active at all, and the reinitialisation of the others.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "twell/base/context.h"
#include "twell/model/weights.h"
#include "twell/ops/ffn_train/ffn_train.h"
#include "twell/train/metrics.h"
#include "twell/train/options.h"

namespace twell {

class StepActivity {
 public:
  explicit StepActivity(const ModelConfig& config);
  void clear();
  // Adds one micro-batch's statistics, one per layer.
  void add(std::span<const FfnTrainStats> layers);
  // [L][F], 1 where a neuron was active; filled by the forward passes.
  std::vector<std::vector<uint8_t>>& active() { return active_; }
  const std::vector<std::vector<uint8_t>>& active() const { return active_; }
  std::vector<LayerMetrics> metrics() const;

 private:
  std::vector<std::vector<uint8_t>> active_;
  std::vector<FfnTrainStats> totals_;  // [L]
};

// Random streams of the reinitialisation, one per layer: "reinit" in ASCII, above any index that
// other uses of the seed count up to.
inline constexpr uint64_t kReinitStream = 0x7265'696e'6974'0000;

// For each neuron j without activity, in the projection that decides whether it is active:
// w[j] <- (1 - strength) w[j] + strength N(0, std^2). A pure function of the seed and the step.
void reinit_dead_neurons(Context& ctx, const TrainOptions& options, int64_t step,
                         const std::vector<std::vector<uint8_t>>& active, Model& model);

}  // namespace twell
