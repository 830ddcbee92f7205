// SPDX-License-Identifier: Apache-2.0
// Activity of the feed-forward layers in one optimizer step: statistics summed over its
// micro-batches, the neurons that were active, and the reinitialisation of all others.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "twell/base/context.h"
#include "twell/dist/communicator.h"
#include "twell/model/weights.h"
#include "twell/ops/ffn_train/ffn_train.h"
#include "twell/train/metrics.h"
#include "twell/train/options.h"
#include "twell/train/shard_layout.h"

namespace twell {

class StepActivity {
 public:
  explicit StepActivity(const ModelConfig& config);
  void clear();
  // Adds the statistics [L] of one micro-batch.
  void add(std::span<const FfnTrainStats> layers);
  // [L][F], 1 where a neuron was active; the forward passes fill it.
  std::vector<std::vector<uint8_t>>& active() { return active_; }
  const std::vector<std::vector<uint8_t>>& active() const { return active_; }
  // A neuron counts as active where it was on any rank. Collective.
  void merge_active(Communicator& ranks);
  std::vector<LayerMetrics> metrics() const;

 private:
  std::vector<std::vector<uint8_t>> active_;
  std::vector<FfnTrainStats> totals_;  // [L]
};

// Random streams of the reinitialisation, one per layer: "reinit" in ASCII, larger than any stream
// index that other users of the seed reach.
inline constexpr uint64_t kReinitStream = 0x7265'696e'6974'0000;

// For each inactive neuron j, in the projection that decides whether it is active: w[j] <- (1 -
// strength) w[j] + strength N(0, std^2). A pure function of the seed and the step. Changes the
// given pieces of the parameters alone.
void reinit_dead_neurons(Context& ctx, const TrainOptions& options, int64_t step,
                         const std::vector<std::vector<uint8_t>>& active,
                         std::span<const ShardPiece> pieces, Model& model);

}  // namespace twell
