// SPDX-License-Identifier: Apache-2.0
// The device of a training run: chooses it for --device, plans its memory, and makes its engine.
#pragma once

#include <memory>
#include <string>

#include "cli/options.h"
#include "cli/ranks.h"
#include "twell/base/context.h"
#include "twell/data/shards.h"
#include "twell/dist/communicator.h"
#include "twell/train/engine.h"
#include "twell/train/options.h"
#include "twell/train/plan.h"

namespace twell::cli {

class TrainDevice {
 public:
  // The options must be resolved. With "auto", a run that the GPU code does not support goes to the
  // CPU, and a line on stderr gives the reason; with "cuda" it is an InputError. The
  // identity decides which GPU it is.
  TrainDevice(const CommonOptions& common, const ModelConfig& config, const TrainOptions& options,
              const RankIdentity& identity);
  ~TrainDevice();

  bool on_gpu() const { return gpu_ != nullptr; }
  std::string name() const;  // "CPU", or the name of the GPU
  RunPlan plan(const ModelConfig& config, const TrainOptions& options, int64_t shard_bytes) const;
  // InputError when the GPU has less free memory than the plan needs.
  void require_memory(const RunPlan& plan) const;
  // All arguments and this object must outlive the engine. teacher, ranks: see TrainEngineCpu.
  std::unique_ptr<TrainEngine> engine(Context& ctx, Model& model, const ShardSet& shards,
                                      const TrainOptions& options, const Model* teacher,
                                      Communicator* ranks) const;

 private:
  struct Gpu;
  std::unique_ptr<Gpu> gpu_;
};

}  // namespace twell::cli
