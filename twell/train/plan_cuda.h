// SPDX-License-Identifier: Apache-2.0
// Plans a run on the GPU before it starts: its memory, and the executions of its layers.
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

// The reason why the GPU code cannot do this run; empty when it can.
std::string cuda_run_unsupported(const ModelConfig& config, const TrainOptions& options);

// In all functions below, hints [L] are the expected activity of the layers; empty: unknown.

// The execution of each layer for a step. InputError when the options request an execution that
// this device does not support.
std::vector<FfnExpectation> expected_executions(const CudaContext& ctx, const ModelConfig& config,
                                                const TrainOptions& options,
                                                std::span<const LayerHint> hints);
// Chooses what backward recomputes, so that activations and optimizer fit into the memory that is
// free now.
TrainingPlanCuda training_plan(const CudaContext& ctx, const ModelConfig& config,
                               const TrainOptions& options, std::span<const LayerHint> hints);
// Device memory of the teacher, 0 without distillation. A teacher has the model's configuration but
// for its activation.
int64_t teacher_bytes(const CudaContext& ctx, const ModelConfig& config,
                      const TrainOptions& options);
// Device and host memory of the run. InputError when the run is not supported.
RunPlan plan_run_cuda(const CudaContext& ctx, const ModelConfig& config,
                      const TrainOptions& options, int64_t shard_bytes,
                      std::span<const LayerHint> hints = {});

int64_t free_device_bytes();

}  // namespace twell
