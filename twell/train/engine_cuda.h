// SPDX-License-Identifier: Apache-2.0
// Training steps on the GPU: bf16 products; f32 weights, gradients and moments. Within a step the
// host only enqueues. Losses and counts are copied back once per step, while the host reads the
// next micro-batch. The first micro-batch after a change of executions is enqueued op by op; later
// ones replay a CUDA graph.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "twell/base/cuda.h"
#include "twell/data/shards.h"
#include "twell/model/training_cuda.h"
#include "twell/train/engine.h"
#include "twell/train/micro_batches.h"
#include "twell/train/optimizer_cuda.h"
#include "twell/train/options.h"
#include "twell/train/plan_cuda.h"

namespace twell {

class TrainEngineCuda : public TrainEngine {
 public:
  // The arguments must outlive the engine; `options` are resolved. InputError where the run is not
  // supported, or the device has too little memory. shards may be null for callers of set_batch.
  // hints: as in plan_run_cuda.
  TrainEngineCuda(CudaContext& ctx, Model& model, const ShardSet* shards,
                  const TrainOptions& options, std::span<const LayerHint> hints = {});
  ~TrainEngineCuda() override;

  Model& model() override { return model_; }
  StepOutcome step(const StepRequest& request) override;
  double validate() override;
  void read_state(const StateFn& use) override;
  void write_state(const StateFn& fill) override;
  double peak_flops() const override { return stated_peak_flops(ctx_.device_name()); }
  int64_t device_bytes() const override { return device_bytes_; }

  // For benchmarks: every micro-batch is this one, of micro_batch * sequence_length tokens.
  void set_batch(std::vector<int32_t> inputs, std::vector<int32_t> targets);
  // The host calls them while it enqueues. With an after_stage, passes are not replayed as graphs.
  // A captured graph keeps what before_ffn did during its capture.
  struct Hooks {
    std::function<void(TrainingStage)> after_stage;
    std::function<void(int64_t layer, FfnTrainForwardCuda& problem)> before_ffn;
    std::function<void()> before_pass, after_optimizer;
  };
  void set_hooks(Hooks hooks);
  int64_t replayed() const;  // micro-batches so far that replayed a graph

 private:
  // What a step reports, in one block of device memory that is copied back at once.
  struct Report;
  class Replay;
  void prepare(std::span<const LayerHint> hints);
  void next_batch(int64_t step, int64_t index);
  void enqueue_micro_batch(bool first);
  StepOutcome outcome() const;

  CudaContext& ctx_;
  Model& model_;
  TrainOptions options_;
  int64_t free_at_start_;  // bytes of device memory
  std::unique_ptr<MicroBatches> micro_batches_;
  std::unique_ptr<ValidationWindows> validation_;
  TrainingCuda training_;
  OptimizerCuda optimizer_;
  std::unique_ptr<Report> report_;
  std::array<std::unique_ptr<Replay>, 2> replays_;  // of a step's first micro-batch, of later ones
  TrainingPassCuda pass_;
  std::vector<int32_t> inputs_, targets_;   // [B * T] of the next micro-batch
  int64_t read_step_ = 0, read_index_ = 0;  // its step and index; step 0: none was read
  bool fixed_batch_ = false;
  bool prepared_ = false;        // a step was prepared
  bool memory_changed_ = false;  // in this step
  Hooks hooks_;
  int64_t device_bytes_ = 0;
};

}  // namespace twell
