// SPDX-License-Identifier: Apache-2.0
// Training forward and backward of the transformer over one micro-batch. The loss is CE, mean over
// tokens, + l1_coeff * mean over layers and tokens of the sum over neurons of |h|.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "twell/base/context.h"
#include "twell/model/weights.h"
#include "twell/ops/ffn_train/ffn_train.h"

namespace twell {

struct MicroBatchShape {
  int64_t sequences = 0;                                 // B
  int64_t length = 0;                                    // T
  int64_t tokens() const { return sequences * length; }  // M
};

// The values that a pass on the GPU computes again in backward instead of keeping them. Results are
// bitwise equal. Each level includes the previous ones. A line lists the values per layer and token
// that are not kept, their number, and what computes them again.
enum class RecomputeLevel {
  kNone,
  kNorms,   // the normalised inputs of both blocks: 2 D; a pass over them
  kInputs,  // the residual stream before the FFN: D; the attention's output projection
  kQkv,     // queries, keys and values: 3 D without grouped heads; their projection, rotation
};

struct Recompute {
  RecomputeLevel level = RecomputeLevel::kNone;
  // Layers below this number use `level`, all others one level less.
  int64_t layers = std::numeric_limits<int64_t>::max();

  RecomputeLevel of_layer(int64_t layer) const {
    if (layer < layers || level == RecomputeLevel::kNone) return level;
    return static_cast<RecomputeLevel>(static_cast<int>(level) - 1);
  }
};

// One line of the memory plan.
struct MemoryItem {
  std::string name;
  int64_t bytes = 0;
};

// Activations of one micro-batch; allocated once.
class TrainingState {
 public:
  TrainingState(const ModelConfig& config, MicroBatchShape shape);
  ~TrainingState();
  // The exact allocations of a training state, and scratch_bytes().
  static std::vector<MemoryItem> memory_plan(const ModelConfig& config, MicroBatchShape shape);
  // An upper bound of the scratch memory that the ops of a pass take from the context.
  static int64_t scratch_bytes(const ModelConfig& config, MicroBatchShape shape);
  struct Activations;
  Activations& activations() { return *activations_; }

 private:
  std::unique_ptr<Activations> activations_;
};

// Checks that documents of these lengths fill the sequences, unless there are none.
void check_documents(std::span<const int64_t> documents, MicroBatchShape shape);

struct TrainingBatch {
  std::span<const int32_t> inputs;   // [B * T]
  std::span<const int32_t> targets;  // [B * T], -1: none
  // The lengths of documents, one after the other, none of them across the end of a sequence;
  // attention stays within each, and positions begin at 0 in each. Empty: every sequence is one.
  std::span<const int64_t> documents = {};
  // Tokens of the whole optimizer step: L1 gradients are scaled by 1 / step_tokens, so that
  // the micro-batches of a step add up to the gradient of the mean.
  int64_t step_tokens = 0;
  // Those of them that have a target: CE gradients are scaled by 1 / step_targets. 0: all.
  int64_t step_targets = 0;
  float l1_coeff = 0.0f;  // per mean over layers and tokens of sum |h| (0: no L1 term)
  FfnTrainPolicy policy = FfnTrainPolicy::kAuto;
  // Replaces the model's activation while a model is moved from another activation to ReLU.
  std::optional<BlendedActivation> activation;
  // Distillation: a teacher's final hidden states of these tokens and its output head. The loss is
  // then (1 - share) * CE + share * KL(teacher || model), and L1.
  ConstMatrixF teacher_hidden = {};  // [B * T, D of the teacher] or empty
  ConstMatrixF teacher_head = {};    // [V, D of the teacher]
  float teacher_share = 0.0f;
  std::vector<double> nnz_hint;  // [L] mean nnz of the previous step, or empty
  std::vector<std::vector<uint8_t>>* active = nullptr;  // [L][F]: see FfnTrainForward
  // Called before forward first reads the weights of a layer, in order: -1 for the embedding, L for
  // the final norm and the head.
  std::function<void(int64_t layer)> before_layer = {};
};

struct TrainingResult {
  double loss_sum = 0.0;  // CE in nats, summed over target tokens
  double kl_sum = 0.0;    // to the teacher, in nats, summed; 0 without one
  int64_t loss_tokens = 0;
  std::vector<FfnTrainStats> layers;  // [L]
};

// Forward and backward; d_flat (layout of parameter_table) is accumulated into.
TrainingResult forward_backward(Context& ctx, const Model& model, const TrainingBatch& batch,
                                TrainingState& state, std::span<float> d_flat);

}  // namespace twell
