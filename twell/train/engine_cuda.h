// SPDX-License-Identifier: Apache-2.0
// Training steps on the GPU: bf16 products; f32 weights, gradients and moments. Within a step the
// host only enqueues. Losses and counts are copied back once per step, while the host reads the
// next micro-batch. The first micro-batch after a change of executions is enqueued op by op; later
// ones replay a CUDA graph.
//
// Several ranks communicate on a second stream, beside the first and the last micro-batch of a
// step, which are therefore enqueued op by op: the layers of the first wait one by one for the
// weights that the last step updated; in the last, gradients of finished layers are reduced while
// backward goes on.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "twell/base/cuda.h"
#include "twell/data/training_data.h"
#include "twell/model/training_cuda.h"
#include "twell/train/engine.h"
#include "twell/train/micro_batches.h"
#include "twell/train/optimizer_cuda.h"
#include "twell/train/options.h"
#include "twell/train/plan_cuda.h"
#include "twell/train/teacher_cuda.h"

namespace twell {

class TrainEngineCuda : public TrainEngine {
 public:
  // The arguments must outlive the engine; `options` must be resolved. InputError when the run is
  // not supported or the device has too little memory. data may be null if set_batch is used.
  // hints: as in plan_run_cuda. ranks: null for a single one; otherwise one rank per GPU. teacher:
  // as for TrainEngineCpu; it is copied to the device.
  TrainEngineCuda(CudaContext& ctx, Model& model, const TrainingData* data,
                  const TrainOptions& options, std::span<const LayerHint> hints = {},
                  Communicator* ranks = nullptr, const Model* teacher = nullptr);
  ~TrainEngineCuda() override;

  StepOutcome step(const StepRequest& request) override;
  double validate() override;
  void read_state(const StateFn& use) override;
  void write_state(const StateFn& fill) override;
  bool rounds_logits() const override { return true; }
  double peak_flops() const override { return stated_peak_flops(ctx_.device_name()); }
  int64_t device_bytes() const override { return device_bytes_; }

  // For benchmarks: uses this batch of micro_batch * sequence_length tokens for every micro-batch,
  // with these documents where there is a document mask.
  void set_batch(std::vector<int32_t> inputs, std::vector<int32_t> targets,
                 std::vector<int64_t> documents = {});
  // The host calls these while enqueuing. With an after_stage, passes are not replayed as graphs. A
  // captured graph repeats what before_ffn did during its capture.
  struct Hooks {
    std::function<void(TrainingStage)> after_stage;
    std::function<void(int64_t layer, FfnTrainForwardCuda& problem)> before_ffn;
    std::function<void()> before_pass, after_optimizer;
  };
  void set_hooks(Hooks hooks);
  ExchangeSeconds exchange_seconds() { return optimizer_.exchange_seconds(); }
  int64_t replayed() const;  // number of micro-batches so far that replayed a graph

 private:
  // The results of a step, in one block of device memory that is copied back at once.
  struct Report;
  class Replay;
  void prepare(const StepRequest& request);
  void next_batch(int64_t step, int64_t index);
  void enqueue_micro_batch(bool first, bool last);
  int64_t own_micro_batches() const;
  StepOutcome outcome();

  CudaContext& ctx_;
  TrainOptions options_;
  int64_t free_at_start_;  // bytes of device memory
  std::unique_ptr<MicroBatches> micro_batches_;
  std::unique_ptr<ValidationWindows> validation_;
  TrainingCuda training_;
  std::unique_ptr<TeacherForwardCuda> teacher_;  // of a distilling run
  std::unique_ptr<NcclCommunicator> nccl_;       // with several ranks
  OptimizerCuda optimizer_;
  std::unique_ptr<Report> report_;
  std::array<std::unique_ptr<Replay>, 2> replays_;  // first micro-batch of a step, later ones
  TrainingPassCuda pass_;
  std::vector<int32_t> inputs_, targets_;   // [B * T] of the next micro-batch
  std::vector<int64_t> documents_;          // its documents; empty without a document mask
  int64_t read_step_ = 0, read_index_ = 0;  // step and index of that batch; step 0: none
  bool fixed_batch_ = false;
  bool prepared_ = false;        // at least one step was prepared
  bool memory_changed_ = false;  // in this step
  Hooks hooks_;
  int64_t device_bytes_ = 0;
};

}  // namespace twell
