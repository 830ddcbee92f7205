// SPDX-License-Identifier: Apache-2.0
// The device that a training run is computed on: chosen by --device, the plan and the engine of it.
#pragma once

#include <memory>
#include <string>

#include "cli/options.h"
#include "twell/base/context.h"
#include "twell/data/shards.h"
#include "twell/train/engine.h"
#include "twell/train/options.h"
#include "twell/train/plan.h"

namespace twell::cli {

class TrainDevice {
 public:
  // Options are resolved. With "auto", a run that the GPU code does not do goes to the CPU, and a
  // line on stderr says why; with "cuda" that is an InputError.
  TrainDevice(const CommonOptions& common, const ModelConfig& config, const TrainOptions& options);
  ~TrainDevice();

  bool on_gpu() const { return gpu_ != nullptr; }
  std::string name() const;  // "CPU", or that of the GPU
  RunPlan plan(const ModelConfig& config, const TrainOptions& options, int64_t shard_bytes) const;
  // InputError where this memory is not free on the GPU.
  void require_memory(const RunPlan& plan) const;
  // Everything given must outlive the engine, this device too. teacher: see TrainEngineCpu.
  std::unique_ptr<TrainEngine> engine(Context& ctx, Model& model, const ShardSet& shards,
                                      const TrainOptions& options, const Model* teacher) const;

 private:
  struct Gpu;
  std::unique_ptr<Gpu> gpu_;
};

}  // namespace twell::cli
