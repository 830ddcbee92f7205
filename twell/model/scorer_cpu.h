// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "twell/model/scorer.h"

namespace twell {

// The context and the model must outlive it.
class ScorerCpu : public Scorer {
 public:
  ScorerCpu(Context& ctx, const ModelView& model, FfnPolicy policy = FfnPolicy::kAuto);

  const ModelConfig& config() const override { return model_.config; }
  FfnPolicy policy() const override { return policy_; }
  int64_t good_batch() const override { return kCpuBatchTokens; }
  int deciding_batches() const override { return 0; }
  std::string weights_hash() override;
  void make_cache(int64_t slots, int64_t capacity) override;
  void set_length(int64_t slot, int64_t length) override { cache_->set_length(slot, length); }
  void score(const ScoreBatch& batch, std::span<float> losses) override;

 private:
  Context& ctx_;
  const ModelView& model_;
  FfnPolicy policy_;
  ForwardState state_;
  std::optional<KvCache> cache_;
};

}  // namespace twell
