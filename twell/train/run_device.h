// SPDX-License-Identifier: Apache-2.0
// The device of a training run: plans its memory and makes its engine. Compiles with and without
// CUDA.
#pragma once

#include <memory>
#include <string>

#include "twell/base/context.h"
#include "twell/data/training_data.h"
#include "twell/dist/communicator.h"
#include "twell/train/engine.h"
#include "twell/train/options.h"
#include "twell/train/plan.h"

namespace twell {

class RunDevice {
 public:
  // gpu: the number of the GPU, or -1 for the CPU; the caller knows that it is there. The options
  // are resolved. A run that the GPU code does not support is an InputError, or with `automatic`
  // goes to the CPU, and why_not_gpu() gives the reason.
  RunDevice(int gpu, bool automatic, const ModelConfig& config, const TrainOptions& options);
  ~RunDevice();

  bool on_gpu() const { return gpu_ != nullptr; }
  const std::string& why_not_gpu() const { return why_not_gpu_; }
  std::string name() const;  // "CPU", or the name of the GPU
  RunPlan plan(const ModelConfig& config, const TrainOptions& options, int64_t shard_bytes) const;
  // InputError when the GPU has less free memory than the plan needs.
  void require_memory(const RunPlan& plan) const;
  // All arguments and this object outlive the engine. teacher, ranks: see TrainEngineCpu.
  std::unique_ptr<TrainEngine> engine(Context& ctx, Model& model, const TrainingData& data,
                                      const TrainOptions& options, const Model* teacher,
                                      Communicator* ranks) const;
  // Makes the GPU the calling thread's.
  void select() const;

 private:
  struct Gpu;
  std::unique_ptr<Gpu> gpu_;
  std::string why_not_gpu_;
};

}  // namespace twell
