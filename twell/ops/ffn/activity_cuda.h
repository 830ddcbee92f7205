// SPDX-License-Identifier: Apache-2.0
// The measured state of layers on the GPU. Kernels count active neurons and unions on the device;
// FfnPlansCuda::update() fetches the counts, at a point where the caller waits for the device
// anyway. Between updates the choice of executions depends on the call alone, so runs repeat, and
// calls can be captured in a CUDA graph (which keeps the choice made at capture).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "twell/base/cuda.h"
#include "twell/format/activity_cuda.h"
#include "twell/ops/ffn/activity.h"
#include "twell/ops/ffn/ffn.h"
#include "twell/ops/ffn/registry.h"

namespace twell {

// One layer. The plan's counts are as of the last update.
struct FfnPlanCuda {
  FfnPlan plan;
  LayerActivity activity;
  ActivityCuda* counts = nullptr;  // device memory: counts since the last update
  int64_t screened_calls = 0;      // chunks of tokens behind a screen so far

  // The last choice and what it was made for, because most calls repeat the one before.
  struct Chosen {
    GpuFfnLayer layer;
    GpuFfnCall call;
    LayerActivity activity;
    GpuFfnChoice choice;
  };
  std::optional<Chosen> last;
};

// Averages of the counts; `before` where nothing was counted.
LayerActivity layer_activity(const ActivityCuda& counts, int64_t ffn, LayerActivity before = {});

// The plans of a model's layers, whose counts are fetched together.
class FfnPlansCuda {
 public:
  // ffn: F of every layer.
  FfnPlansCuda(CudaContext& ctx, int64_t layers, int64_t ffn, FfnPolicy policy);

  FfnPlanCuda& operator[](int64_t layer) { return plans_[static_cast<size_t>(layer)]; }
  const FfnPlanCuda& operator[](int64_t layer) const { return plans_[static_cast<size_t>(layer)]; }
  int64_t size() const { return static_cast<int64_t>(plans_.size()); }

  // Waits for the stream and adds the layers' counts since the last call to their plans.
  void update(CudaContext& ctx);
  // Updates so far. The same calls have the same choices, captured or not, until it changes.
  int64_t revision() const { return revision_; }

 private:
  int64_t ffn_;
  int64_t revision_ = 0;
  DeviceBuffer<ActivityCuda> counts_;  // [L]
  std::vector<FfnPlanCuda> plans_;     // [L]
};

}  // namespace twell
