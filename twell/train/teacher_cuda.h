// SPDX-License-Identifier: Apache-2.0
// The teacher of a distilling run on the GPU: its weights in bf16, and its final hidden states of a
// micro-batch. Its logits are made by the head's op, a chunk of tokens at a time.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <span>

#include "twell/base/cuda.h"
#include "twell/model/forward_cuda.h"
#include "twell/model/model_cuda.h"
#include "twell/model/training.h"
#include "twell/ops/cross_entropy/cross_entropy_cuda.h"

namespace twell {

class TeacherForwardCuda {
 public:
  // InputError when the device has too little memory. The context must outlive it.
  TeacherForwardCuda(CudaContext& ctx, const Model& teacher, MicroBatchShape shape);
  // The device memory that it takes.
  static int64_t bytes_needed(const CudaContext& ctx, const ModelConfig& teacher,
                              MicroBatchShape shape);

  // Enqueues the forward pass of a micro-batch [B * T], whose documents (none: whole sequences)
  // attend to themselves. Waits where two earlier ones are still under way.
  void run(std::span<const int32_t> inputs, std::span<const int64_t> documents);
  // What the loss takes of it, after each run at the same place.
  TeacherCuda of_share(double share) const;

 private:
  CudaContext& ctx_;
  MicroBatchShape shape_;
  ModelCuda model_;
  ForwardCuda forward_;
  DeviceBuffer<__nv_bfloat16> hidden_;  // [B * T, D]
};

}  // namespace twell
