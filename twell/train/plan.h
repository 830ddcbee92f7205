// SPDX-License-Identifier: Apache-2.0
// What a run will take, known before it starts.
#pragma once

#include <cstdint>
#include <vector>

#include "twell/model/config.h"
#include "twell/model/training.h"
#include "twell/train/options.h"

namespace twell {

struct RunPlan {
  int64_t parameters = 0;
  std::vector<MemoryItem> memory;         // of the host
  std::vector<MemoryItem> device_memory;  // of the GPU that it trains on; else empty
  // Pages of the mapped token shards that the run will have read. They count as resident, but leave
  // when memory is short, and are in the page cache in any case.
  int64_t mapped_bytes = 0;
  double flops_per_token = 0.0;  // forward and backward, dense
  double flops_per_step = 0.0;

  int64_t memory_bytes() const;  // of the host, without the mapped
  int64_t device_bytes() const;
};

// On the CPU. Options are resolved. shard_bytes: of all shard files; 0: unknown.
RunPlan plan_run(const ModelConfig& config, const TrainOptions& options, int64_t shard_bytes);

// The same but for the memory that the computation takes, for engines on other devices to fill in.
RunPlan plan_without_engine(const ModelConfig& config, const TrainOptions& options,
                            int64_t shard_bytes);

// Forward and backward, dense: what MFU counts.
double training_flops_per_token(const ModelConfig& config, const TrainOptions& options);

}  // namespace twell
