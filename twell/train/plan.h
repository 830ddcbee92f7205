// SPDX-License-Identifier: Apache-2.0
// The memory and FLOPs of a run, computed before it starts.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "twell/model/config.h"
#include "twell/model/training.h"
#include "twell/train/options.h"

namespace twell {

struct RunPlan {
  int64_t parameters = 0;
  std::vector<MemoryItem> memory;         // on the host
  std::vector<MemoryItem> device_memory;  // on the training GPU; empty on the CPU
  // Pages of the mapped token shards that the run will read. They count as resident, but the system
  // can drop them when memory is short.
  int64_t mapped_bytes = 0;
  double flops_per_token = 0.0;  // forward and backward, dense
  double flops_per_step = 0.0;

  int64_t memory_bytes() const;  // host total, without mapped_bytes
  int64_t device_bytes() const;
};

// Bytes of a checkpoint of the run, but for its small files: the weights in the dtype they are
// saved in, two f32 moments, and the f32 weights where those are saved in another dtype.
int64_t checkpoint_bytes(const ModelConfig& config, const TrainOptions& options);

// For the CPU. The options must be resolved. shard_bytes: size of all shard files; 0: unknown.
RunPlan plan_run(const ModelConfig& config, const TrainOptions& options, int64_t shard_bytes);

// The same without the memory of the computation, which engines for other devices add.
RunPlan plan_without_engine(const ModelConfig& config, const TrainOptions& options,
                            int64_t shard_bytes);

// The plan of a run on a GPU of a kind that is not known: its device memory is that of weights,
// gradients and moments alone, without activations and libraries.
RunPlan plan_run_unknown_gpu(const ModelConfig& config, const TrainOptions& options,
                             int64_t shard_bytes);

// FLOPs of forward and backward, dense. MFU is their rate divided by the device's peak.
double training_flops_per_token(const ModelConfig& config, const TrainOptions& options);
// The manufacturer's peak in FLOP/s for dense bf16 products at boost clock; 0 for a device that is
// not in the table.
double stated_peak_flops(std::string_view device_name);

}  // namespace twell
