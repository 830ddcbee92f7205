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
  std::vector<MemoryItem> memory;
  double flops_per_token = 0.0;  // forward and backward, dense
  double flops_per_step = 0.0;

  int64_t memory_bytes() const;
};

RunPlan plan_run(const ModelConfig& config, const TrainOptions& options);  // options resolved

}  // namespace twell
