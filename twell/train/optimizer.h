// SPDX-License-Identifier: Apache-2.0
// AdamW, or Muon for matrices of layers and AdamW for the rest, over a rank's shard of a model:
// weight decay on matrices only, gradients clipped by their global norm.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "twell/base/buffer.h"
#include "twell/base/context.h"
#include "twell/dist/communicator.h"
#include "twell/model/weights.h"
#include "twell/train/muon_matrices.h"
#include "twell/train/options.h"
#include "twell/train/shard_layout.h"

namespace twell {

class Optimizer {
 public:
  // ranks: null for a single one; otherwise it outlives the optimizer.
  Optimizer(const Model& model, const ShardLayout& layout, OptimizerKind kind, Communicator* ranks);

  // Takes step `step`, counted from 1, with gradients [N] of global norm `grad_norm`. Changes the
  // layout's pieces of the weights alone; Muon overwrites the gradients, and is collective.
  void step(Context& ctx, const TrainOptions& options, int64_t step, double grad_norm,
            std::span<float> grads, Model& model);

  std::span<float> exp_avg() const { return exp_avg_.span(); }        // [S]
  std::span<float> exp_avg_sq() const { return exp_avg_sq_.span(); }  // [S]

 private:
  void adamw(Context& ctx, const TrainOptions& options, int64_t step, double grad_scale,
             std::span<const float> grads, Model& model);
  void muon(Context& ctx, const TrainOptions& options, int64_t step, double grad_scale,
            std::span<float> grads, Model& model);

  ShardLayout layout_;
  Communicator* ranks_;
  std::vector<MuonMatrix> matrices_;  // with Muon
  // Consecutive parameters of a piece with the same weight decay.
  struct Run {
    int64_t offset = 0;
    int64_t local = 0;  // in the shard
    int64_t size = 0;
    bool decay = false;
  };
  std::vector<Run> runs_;
  Buffer<float> exp_avg_;
  Buffer<float> exp_avg_sq_;
};

}  // namespace twell
