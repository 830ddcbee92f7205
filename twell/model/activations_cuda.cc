// SPDX-License-Identifier: Apache-2.0
#include "twell/model/activations_cuda.h"

#include <algorithm>

#include "twell/model/qkv.h"
#include "twell/ops/bias/bias_backward_cuda.h"
#include "twell/ops/rms_norm/rms_norm_backward_cuda.h"

namespace twell {
namespace {

constexpr int64_t kAlignBytes = 256;  // as cudaMalloc

// Cuts aligned arrays off a block and keeps account of them by name. Without a block it only keeps
// account.
class Carver {
 public:
  explicit Carver(std::byte* block) : block_(block) {}

  template <typename T>
  void array(const char* item, int64_t size, T*& out) {
    if (block_ != nullptr) out = reinterpret_cast<T*>(block_ + plan_.bytes);
    const int64_t bytes = size * static_cast<int64_t>(sizeof(T));
    const int64_t taken = (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
    plan_.bytes += taken;
    auto& items = plan_.items;
    const auto found = std::find_if(items.begin(), items.end(),
                                    [&](const MemoryItem& known) { return known.name == item; });
    (found != items.end() ? *found : items.emplace_back(MemoryItem{item, 0})).bytes += taken;
  }
  ActivationPlanCuda take_plan() { return std::move(plan_); }

 private:
  std::byte* block_;
  ActivationPlanCuda plan_;
};

// Whether some layer makes it again.
bool makes_again(const TrainingPlanCuda& plan, RecomputeLevel of) {
  return plan.recompute.of_layer(0) >= of;
}

ActivationViewsCuda carve(const ModelConfig& config, const TrainingPlanCuda& plan, Carver& carver) {
  constexpr const char* kStream = "activations: residual stream, norms";
  constexpr const char* kAttention = "activations: attention";
  constexpr const char* kGradients = "gradients of activations";
  const int64_t tokens = plan.shape.sequences * plan.shape.length;
  const int64_t row = tokens * config.width;
  ActivationViewsCuda views;
  carver.array(kStream, row, views.delta);
  carver.array(kStream, row, views.final_in);
  carver.array(kStream, row, views.normed);
  views.layers.resize(static_cast<size_t>(config.layers));
  __nv_bfloat16* shared_ffn_in = nullptr;
  if (makes_again(plan, RecomputeLevel::kInputs)) carver.array(kStream, row, shared_ffn_in);
  for (int64_t i = 0; i < config.layers; ++i) {
    LayerActivationsCuda& layer = views.layers[static_cast<size_t>(i)];
    const RecomputeLevel level = plan.recompute.of_layer(i);
    carver.array(kStream, row, layer.attention_in);
    carver.array(kAttention, tokens * config.heads, layer.logsumexp);
    carver.array(kAttention, tokens * config.q_width(), layer.attended);
    if (level < RecomputeLevel::kQkv) {
      carver.array(kAttention, tokens * qkv_width(config), layer.qkv);
    }
    layer.ffn_in = shared_ffn_in;
    if (level < RecomputeLevel::kInputs) carver.array(kStream, row, layer.ffn_in);
    layer.attention_normed = layer.ffn_normed = views.normed;
    if (level >= RecomputeLevel::kNorms) continue;
    carver.array(kStream, row, layer.attention_normed);
    carver.array(kStream, row, layer.ffn_normed);
  }
  carver.array(kGradients, row, views.d_residual);
  carver.array(kGradients, row, views.d_normed);
  carver.array(kGradients, tokens, views.losses);
  int64_t partials = rms_norm_backward_partials(tokens) * config.width;
  if (config.qkv_bias) {
    partials = std::max(partials, bias_backward_partials(tokens) * qkv_width(config));
  }
  carver.array(kGradients, partials, views.partial);
  return views;
}

void carve_attention(const ModelConfig& config, const TrainingPlanCuda& plan, Carver& carver,
                     ActivationViewsCuda& views) {
  constexpr const char* kScratch = "attention at work";
  const int64_t tokens = plan.shape.sequences * plan.shape.length;
  if (makes_again(plan, RecomputeLevel::kQkv)) {
    carver.array(kScratch, tokens * qkv_width(config), views.qkv);
  }
  carver.array(kScratch, tokens * qkv_width(config), views.d_qkv);
  carver.array(kScratch, tokens * config.q_width(), views.d_attended);
}

}  // namespace

ActivationPlanCuda plan_activations(const ModelConfig& config, const TrainingPlanCuda& plan) {
  Carver carver(nullptr);
  carve(config, plan, carver);
  return carver.take_plan();
}

ActivationViewsCuda place_activations(const ModelConfig& config, const TrainingPlanCuda& plan,
                                      std::byte* block) {
  Carver carver(block);
  return carve(config, plan, carver);
}

int64_t attention_scratch_bytes(const ModelConfig& config, const TrainingPlanCuda& plan) {
  Carver carver(nullptr);
  ActivationViewsCuda views;
  carve_attention(config, plan, carver, views);
  return carver.take_plan().bytes;
}

void place_attention_scratch(const ModelConfig& config, const TrainingPlanCuda& plan,
                             std::byte* block, ActivationViewsCuda& views) {
  Carver carver(block);
  carve_attention(config, plan, carver, views);
  for (int64_t i = 0; i < config.layers; ++i) {
    if (plan.recompute.of_layer(i) < RecomputeLevel::kQkv) continue;
    views.layers[static_cast<size_t>(i)].qkv = views.qkv;
  }
}

}  // namespace twell
