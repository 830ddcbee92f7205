// SPDX-License-Identifier: Apache-2.0
// What a run will take on the GPU, and how its layers will run, before it starts.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "twell/base/cuda.h"
#include "twell/model/training_cuda.h"
#include "twell/train/options.h"
#include "twell/train/plan.h"
#include "twell/train/trainer_state.h"

namespace twell {

// Why the GPU cannot do this run; empty when it can.
std::string cuda_run_unsupported(const ModelConfig& config, const TrainOptions& options);

// In all of these hints [L] is how active the layers are expected to be; empty: not known.

// The execution of each layer for a step. InputError where the options ask for one that does not
// run on this device.
std::vector<FfnExpectation> expected_executions(const CudaContext& ctx, const ModelConfig& config,
                                                const TrainOptions& options,
                                                std::span<const LayerHint> hints);
// What is kept is decided by the memory that is free now, beside the optimizer's.
TrainingPlanCuda training_plan(const CudaContext& ctx, const ModelConfig& config,
                               const TrainOptions& options, std::span<const LayerHint> hints);
// Device memory, and what the host needs beside it. InputError where the run is not supported.
RunPlan plan_run_cuda(const CudaContext& ctx, const ModelConfig& config,
                      const TrainOptions& options, int64_t shard_bytes,
                      std::span<const LayerHint> hints = {});

int64_t free_device_bytes();

}  // namespace twell
