// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/activity_cuda.h"

#include <algorithm>

namespace twell {

LayerActivity layer_activity(const ActivityCuda& counts, int64_t ffn, LayerActivity before) {
  if (counts.tokens > 0) {
    before.nnz_per_token = static_cast<double>(counts.nnz) / static_cast<double>(counts.tokens);
  }
  if (counts.unions > 0) {
    const auto unions = static_cast<double>(counts.unions);
    before.union_share =
        static_cast<double>(counts.union_neurons) / (unions * static_cast<double>(ffn));
    before.largest_union = static_cast<double>(counts.largest_union) /
                           static_cast<double>(counts.union_calls) / static_cast<double>(ffn);
    before.extra_tiles = std::max(unions / (static_cast<double>(counts.tokens) / 128.0) - 1.0, 0.0);
    before.union_growth = union_growth(before, ffn);
  }
  if (counts.candidate_unions > 0) {
    before.candidate_share = static_cast<double>(counts.candidate_union_neurons) /
                             static_cast<double>(counts.candidate_unions) /
                             static_cast<double>(ffn);
  }
  return before;
}

FfnPlansCuda::FfnPlansCuda(CudaContext& ctx, int64_t layers, int64_t ffn, FfnPolicy policy)
    : ffn_(ffn), counts_(layers), plans_(static_cast<size_t>(layers)) {
  TWELL_CUDA_CHECK(
      cudaMemsetAsync(counts_.data(), 0, static_cast<size_t>(counts_.bytes()), ctx.stream()));
  for (int64_t layer = 0; layer < layers; ++layer) {
    plans_[static_cast<size_t>(layer)].plan.policy = policy;
    plans_[static_cast<size_t>(layer)].counts = counts_.data() + layer;
  }
}

void FfnPlansCuda::update(CudaContext& ctx) {
  ++revision_;
  std::vector<ActivityCuda> counts(plans_.size());
  const auto bytes = static_cast<size_t>(counts_.bytes());
  TWELL_CUDA_CHECK(
      cudaMemcpyAsync(counts.data(), counts_.data(), bytes, cudaMemcpyDeviceToHost, ctx.stream()));
  TWELL_CUDA_CHECK(cudaMemsetAsync(counts_.data(), 0, bytes, ctx.stream()));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
  for (size_t layer = 0; layer < plans_.size(); ++layer) {
    FfnPlanCuda& plan = plans_[layer];
    const ActivityCuda& count = counts[layer];
    plan.activity = layer_activity(count, ffn_, plan.activity);
    plan.plan.tokens += static_cast<int64_t>(count.tokens);
    plan.plan.nnz += static_cast<int64_t>(count.nnz);
    plan.plan.max_row_nnz =
        std::max(plan.plan.max_row_nnz, static_cast<int64_t>(count.max_row_nnz));
    plan.plan.checked_pairs += static_cast<int64_t>(count.checked_pairs);
    plan.plan.missed_pairs += static_cast<int64_t>(count.missed_pairs);
  }
}

}  // namespace twell
