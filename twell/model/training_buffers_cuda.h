// SPDX-License-Identifier: Apache-2.0
// What a TrainingCuda holds, and the pass over it. Internal to model.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "twell/model/activations_cuda.h"
#include "twell/ops/embedding/embedding_backward_cuda.h"

namespace twell {

// Page-locked memory for one micro-batch, and when its last copy was done.
class StagingSlot {
 public:
  explicit StagingSlot(int64_t tokens) {
    TWELL_CUDA_CHECK(cudaMallocHost(reinterpret_cast<void**>(&data_),
                                    static_cast<size_t>(2 * tokens) * sizeof(int32_t)));
    TWELL_CUDA_CHECK(cudaEventCreateWithFlags(&copied_, cudaEventDisableTiming));
  }
  ~StagingSlot() {
    cudaEventSynchronize(copied_);
    cudaEventDestroy(copied_);
    cudaFreeHost(data_);
  }
  StagingSlot(const StagingSlot&) = delete;
  StagingSlot& operator=(const StagingSlot&) = delete;

  int32_t* data() const { return data_; }
  cudaEvent_t copied() const { return copied_; }

 private:
  int32_t* data_ = nullptr;
  cudaEvent_t copied_ = nullptr;
};

// Memory for micro-batches of one shape.
struct TrainingCuda::Buffers {
  Buffers(CudaContext& ctx, const ModelConfig& config, const TrainingPlanCuda& plan, bool hybrid);
  // Room for hybrid layers, or only for dense ones. Not while a pass is on its way.
  void make_scratch(CudaContext& ctx, const ModelConfig& config, const TrainingPlanCuda& plan,
                    bool hybrid);

  DeviceBuffer<std::byte> memory;
  ActivationViewsCuda views;
  std::vector<FfnSavedCuda> ffn;         // [L]
  std::vector<FfnExpectation> prepared;  // [L] what for
  // One after the other, a feed-forward layer, the attention of a layer and the head work here.
  DeviceBuffer<std::byte> scratch;
  bool scratch_hybrid = false;
  std::optional<FfnTrainWorkspaceCuda> ffn_workspace;
  std::optional<CrossEntropyWorkspaceCuda> head;
  EmbeddingWorkspaceCuda embedding;
  DeviceBuffer<int32_t> batch;      // [2, M] inputs and targets
  DeviceBuffer<float> cos, sin;     // [T, hd / 2]
  DeviceBuffer<int32_t> positions;  // [M]
  std::array<StagingSlot, 2> slots;
  size_t next_slot = 0;
};

inline int64_t token_count(MicroBatchShape shape) { return shape.sequences * shape.length; }

}  // namespace twell
