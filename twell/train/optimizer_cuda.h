// SPDX-License-Identifier: Apache-2.0
// The parameters of a model in training on the GPU, and AdamW for them. Weights are f32 in two
// halves; layers compute with the upper half (split_weight.h). Gradients are f32, moments f32 or
// bf16. Each is one flat array laid out by parameter_table. Values that change in every step are
// read from device memory.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <span>

#include "twell/base/cuda.h"
#include "twell/model/weights.h"
#include "twell/ops/adamw/adamw_cuda.h"
#include "twell/train/options.h"
#include "twell/train/trainer_state.h"

namespace twell {

class OptimizerCuda {
 public:
  // Starts with the model's weights and zero moments. Waits for the device.
  OptimizerCuda(CudaContext& ctx, const Model& model, const TrainOptions& options);
  static int64_t bytes_needed(int64_t parameters, DType moments);

  const __nv_bfloat16* weights() const { return weights_.data(); }  // [N]
  float* grads() const { return grads_.data(); }                    // [N] uninitialised at first

  // Enqueues *norm = norm of the gradients, then AdamW, which is skipped if the norm is not finite.
  // Both pointers refer to device memory.
  void step(const AdamWCoefficients* coefficients, GradientNorm* norm);
  // Enqueues reinit_dead_neurons of activity.h, skipped together with the step. active [L, F] is
  // device memory; `step` counts from 1.
  void reinit_dead(int64_t step, const uint8_t* active, const GradientNorm* norm);

  // For use between steps: copy to and from host memory, always as f32. They wait for the device
  // and overwrite the gradients.
  void download(const OptimizerTensors& to) const;
  void upload(const OptimizerTensors& from);

 private:
  void check_sizes(const OptimizerTensors& tensors) const;
  CudaContext& ctx_;
  TrainOptions options_;
  ModelConfig config_;
  int64_t size_;
  int64_t run_count_ = 0;
  DeviceBuffer<AdamWRun> runs_;
  DeviceBuffer<__nv_bfloat16> weights_;           // [N] upper halves
  DeviceBuffer<int16_t> rest_;                    // [N] lower halves
  DeviceBuffer<float> grads_;                     // [N]
  DeviceBuffer<std::byte> exp_avg_, exp_avg_sq_;  // [N] of the moments' type
  DeviceBuffer<double> norm_partials_;
};

}  // namespace twell
