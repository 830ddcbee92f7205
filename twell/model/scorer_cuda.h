// SPDX-License-Identifier: Apache-2.0
// A scorer on the GPU. Device memory grows with the largest batch so far. The FFN layers choose
// their executions from the activity of the first batch and keep them.
#pragma once

#include <optional>

#include "twell/model/forward_cuda.h"
#include "twell/model/scorer.h"

namespace twell {

// The context and the model must outlive it.
class ScorerCuda : public Scorer {
 public:
  ScorerCuda(CudaContext& ctx, const ModelCuda& model, FfnPolicy policy = FfnPolicy::kAuto);
  ~ScorerCuda() override;
  // Estimate of the device memory that a scorer takes in addition to the model.
  static int64_t bytes_needed(const CudaContext& ctx, const ModelConfig& config,
                              const ScorerPlan& plan);

  const ModelConfig& config() const override { return model_.config(); }
  FfnPolicy policy() const override { return policy_; }
  int64_t good_batch() const override { return kGpuBatchTokens; }
  // The first batch counts active neurons, and the second one counts candidates of screens.
  int deciding_batches() const override {
    return !chooses(policy_) ? 0 : policy_ == FfnPolicy::kAuto ? 1 : 2;
  }
  std::string weights_hash() override { return model_.weights_hash(ctx_); }
  void make_cache(int64_t slots, int64_t capacity) override;
  void set_length(int64_t slot, int64_t length) override { cache_->set_length(slot, length); }
  void score(const ScoreBatch& batch, std::span<float> losses) override;

 private:
  class FiredNeurons;

  void make_room(const ScoreBatch& batch);
  void score_rows(const ScoreBatch& batch, std::span<float> losses);
  void read_row_nnz(const ScoreBatch& batch) const;

  CudaContext& ctx_;
  const ModelCuda& model_;
  FfnPolicy policy_;
  int batches_ = 0;  // of those that decide
  std::optional<ForwardCuda> forward_;
  std::optional<KvCacheCuda> cache_;
  int64_t head_rows_;                    // tokens whose logits are made together
  DeviceBuffer<int32_t> row_nnz_;        // [L, M]
  DeviceBuffer<int32_t> rows_;           // [N]
  DeviceBuffer<int32_t> targets_;        // [N]
  DeviceBuffer<float> losses_;           // [N]
  DeviceBuffer<__nv_bfloat16> hidden_;   // [head_rows, D]
  DeviceBuffer<float> logits_;           // [head_rows, V]
  std::unique_ptr<FiredNeurons> fired_;  // allocated by the first batch that needs it
};

}  // namespace twell
