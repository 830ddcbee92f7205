// SPDX-License-Identifier: Apache-2.0
// The parameters of a model in training on the GPU, and AdamW or Muon for them. Weights are f32 in
// two halves; layers compute with the upper half (split_weight.h). Gradients are f32, moments f32
// or bf16. Weights' upper halves and gradients are flat arrays laid out by parameter_table; lower
// halves and moments are those of the rank's shard (shard_layout.h). Values that change in every
// step are read from device memory.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "twell/base/cuda.h"
#include "twell/dist/nccl_communicator_cuda.h"
#include "twell/model/weights.h"
#include "twell/ops/adamw/adamw_cuda.h"
#include "twell/ops/muon/muon_cuda.h"
#include "twell/train/muon_matrices.h"
#include "twell/train/options.h"
#include "twell/train/shard_layout.h"
#include "twell/train/trainer_state.h"

namespace twell {

// How long a step's collective calls ran on the GPU, waiting for other ranks included.
struct ExchangeSeconds {
  double gradients = 0.0;  // reduce-scatter, or its replacement in bf16
  double weights = 0.0;    // all-gather
};

class OptimizerCuda {
 public:
  // Starts with the model's weights and zero moments. Waits for the device. ranks: null for a
  // single one. All but the layout and the model outlive it.
  OptimizerCuda(CudaContext& ctx, const Model& model, const TrainOptions& options,
                const ShardLayout& layout, NcclCommunicator* ranks);
  ~OptimizerCuda();
  static int64_t bytes_needed(const ModelConfig& config, const TrainOptions& options);

  const __nv_bfloat16* weights() const { return weights_.data(); }  // [N]
  float* grads() const { return grads_.data(); }                    // [N] uninitialised at first

  // With several ranks, called while the last backward pass of a step is enqueued
  // (TrainingPassCuda::after_backward): starts reducing the gradients that are complete, beside the
  // rest of the pass.
  void reduce_after(int64_t layer);
  // With several ranks, after the pass and before step(): a neuron is active where it was on any
  // rank. active [L * F]: device memory.
  void merge_active(uint8_t* active, int64_t count);

  // What a step's optimizers read from device memory.
  struct Coefficients {
    AdamWCoefficients adamw;
    MuonCoefficients muon;
  };
  // Enqueues *norm = norm of all gradients, then the step, which is skipped if the norm is not
  // finite. Both pointers refer to device memory. Muon overwrites the gradients. With several ranks
  // the weights of the other ranks' pieces are out of date until they are gathered.
  void step(const Coefficients* coefficients, GradientNorm* norm);
  // Enqueues reinit_dead_neurons of activity.h, skipped together with the step. active [L, F] is
  // device memory; `step` counts from 1.
  void reinit_dead(int64_t step, const uint8_t* active, const GradientNorm* norm);

  // Starts the exchange of updated weights, bucket by bucket in the order of the layers, beside
  // what the context's stream does next; no-op for a single rank.
  void gather_weights();
  // Waits until the weights of this layer and of those before it are gathered (-1: the embedding's,
  // L: all). RankFault.
  void await_weights(int64_t layer);
  // The last step's collective calls. Waits until the weights are gathered.
  ExchangeSeconds exchange_seconds();
  // Waits for all work on the context's stream. RankFault (nccl_communicator_cuda.h).
  void wait() const;

  // For use between steps, by all ranks: copy to and from host memory, always as f32. They wait for
  // the device and overwrite the gradients.
  void download(const OptimizerTensors& to);
  void upload(const OptimizerTensors& from);

 private:
  struct Exchange;
  void reduce(size_t bucket);
  void gradient_norm(GradientNorm* norm);
  void adamw(const AdamWCoefficients* coefficients, const GradientNorm* norm);
  void muon(const MuonCoefficients* coefficients, const GradientNorm* norm);
  template <typename Call>
  void exchange_buckets(const Call& call);
  void gather_joined() const;
  void check_sizes(const OptimizerTensors& tensors) const;
  CudaContext& ctx_;
  TrainOptions options_;
  ModelConfig config_;
  ShardLayout layout_;
  // A piece's runs of equal weight decay, relative to its begin, within runs_.
  struct PieceRuns {
    int64_t first = 0, count = 0;
  };
  std::vector<PieceRuns> piece_runs_;
  DeviceBuffer<AdamWRun> runs_;
  DeviceBuffer<__nv_bfloat16> weights_;           // [N] upper halves
  DeviceBuffer<int16_t> rest_;                    // [S] lower halves
  DeviceBuffer<float> grads_;                     // [N]
  DeviceBuffer<std::byte> exp_avg_, exp_avg_sq_;  // [S] of the moments' type
  DeviceBuffer<double> norm_partials_;
  std::vector<MuonMatrix> matrices_;        // with Muon
  DeviceBuffer<std::byte> muon_workspace_;  // of the largest of them
  std::unique_ptr<Exchange> exchange_;      // with several ranks
};

}  // namespace twell
