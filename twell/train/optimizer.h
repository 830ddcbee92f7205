// SPDX-License-Identifier: Apache-2.0
// AdamW over a rank's shard of a model: weight decay on matrices only, gradients clipped by their
// global norm.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "twell/base/buffer.h"
#include "twell/base/context.h"
#include "twell/model/weights.h"
#include "twell/train/options.h"
#include "twell/train/shard_layout.h"

namespace twell {

class Optimizer {
 public:
  explicit Optimizer(const Model& model, const ShardLayout& layout);

  // Takes step `step`, counted from 1, with gradients [N] of global norm `grad_norm`. Reads and
  // changes the layout's pieces alone.
  void step(Context& ctx, const TrainOptions& options, int64_t step, double grad_norm,
            std::span<const float> grads, Model& model);

  std::span<float> exp_avg() const { return exp_avg_.span(); }        // [S]
  std::span<float> exp_avg_sq() const { return exp_avg_sq_.span(); }  // [S]

 private:
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
