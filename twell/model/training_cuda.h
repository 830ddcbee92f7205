// SPDX-License-Identifier: Apache-2.0
// Training forward and backward of the transformer over one micro-batch on the GPU: computes what
// training.h does, with weights and activations in bf16 and gradients in f32. Memory is planned for
// one shape before the first step. A pass only enqueues, never waits for the device, and repeats
// bit for bit; but the first pass of a shape or an execution plans its matrix products, which
// allocates and may wait. A pass can be captured in a CUDA graph and replayed after each stage().
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "twell/base/cuda.h"
#include "twell/model/training.h"
#include "twell/ops/cross_entropy/cross_entropy_cuda.h"
#include "twell/ops/ffn_train/ffn_train_cuda.h"

namespace twell {

// The execution of a layer's FFN, for about nnz active neurons per token and union_neurons in a
// tile of 128 tokens (negative: not known).
struct FfnExpectation {
  FfnTrainExecution execution = FfnTrainExecution::kDense;
  double nnz = -1.0;
  double union_neurons = -1.0;
};

struct TrainingPlanCuda {
  MicroBatchShape shape;  // sequences of at least 2 tokens
  Recompute recompute = {};
  bool document_mask = false;            // stage() then takes documents
  std::vector<FfnExpectation> ffn = {};  // [L] at first; empty: dense
  // Layers may become hybrid later, where that is supported. Only memory_plan uses this.
  bool may_become_hybrid = false;
  bool distills = false;  // passes may have a teacher
};

// Parts of a pass, forward and backward, for timing.
enum class TrainingStage { kEmbedding, kNorm, kProjections, kAttention, kFfn, kHead };

// What a pass reads and adds to, all in device memory. A captured pass keeps these addresses.
struct TrainingPassCuda {
  const __nv_bfloat16* weights = nullptr;  // [N], laid out by parameter_table
  // Gradients of grad_scale * (sum of CE) + *l1_scale * (sum over layers, tokens, neurons of |h|).
  float grad_scale = 0.0f;
  const float* ce_scale = nullptr;       // one value, a factor of grad_scale; null: 1
  const float* l1_scale = nullptr;       // one value
  float* grads = nullptr;                // [N] accumulated into
  bool add = true;                       // to grads; false: they are overwritten
  CrossEntropySum* loss = nullptr;       // one value, added to
  FfnTrainCountsCuda* counts = nullptr;  // [L] added to
  uint8_t* active = nullptr;             // [L, F], set to 1 where a neuron fires
  // While a model is moved to ReLU: the activation in place of its own, blended with a share of
  // ReLU (one value). Layers are dense then.
  std::optional<Activation> activation = {};
  const float* relu_share = nullptr;
  // Distillation, without the place for kl: the hidden states of the micro-batch staged last.
  TeacherCuda teacher = {};
  // Called while forward is enqueued, before what reads the weights of a layer first, in order: -1
  // for the embedding, L for the final norm and the head.
  std::function<void(int64_t layer)> before_layer = {};
  // Called while backward is enqueued: the gradients of a layer and of all after it are enqueued
  // completely. Layer L stands for what comes after the last one, -1 for the embedding, and so for
  // the whole pass.
  std::function<void(int64_t layer)> after_backward = {};
  // For benchmarks.
  std::function<void(TrainingStage)> after_stage = {};
  std::function<void(int64_t layer, FfnTrainForwardCuda& problem)> before_ffn = {};
};

class TrainingCuda {
 public:
  // InputError where the model or the shape is not supported, or where memory_plan and
  // `other_bytes` do not fit into the device's free memory. The context must outlive it.
  TrainingCuda(CudaContext& ctx, const ModelConfig& config, const TrainingPlanCuda& plan,
               int64_t other_bytes = 0);
  ~TrainingCuda();
  // The most device memory that it takes, cuDNN's and cuBLAS's included.
  static std::vector<MemoryItem> memory_plan(const CudaContext& ctx, const ModelConfig& config,
                                             const TrainingPlanCuda& plan);

  // Between steps: prepares all layers [L] for these executions, those that need less memory first,
  // so that it never holds more than before or after. True where something changed; then it waited
  // for the device, and passes captured before are invalid.
  bool prepare(std::span<const FfnExpectation> expected);
  FfnTrainExecution execution(int64_t layer) const;

  // Checks a micro-batch [B * T], with -1 for no target, and enqueues its copy to the device. Waits
  // only where two earlier copies are still under way. documents: as in TrainingBatch, with a
  // document mask only.
  void stage(std::span<const int32_t> inputs, std::span<const int32_t> targets,
             std::span<const int64_t> documents = {});
  // Forward and backward of the micro-batch staged last.
  void forward_backward(const TrainingPassCuda& pass);
  // Its loss alone, with the model's own activation and without a teacher. Reads pass.weights and
  // adds to pass.loss only.
  void evaluate(const TrainingPassCuda& pass);

  // Memory that a layer's FFN keeps from forward to backward when it is prepared for this.
  static int64_t ffn_saved_bytes(const FfnTrainShapeCuda& shape, const FfnExpectation& expected);

 private:
  struct Buffers;
  class Pass;
  bool is_prepared(size_t layer, const FfnExpectation& expected) const;
  void prepare_layer(size_t layer, const FfnExpectation& expected);
  void set_scratch(bool hybrid);
  CudaContext& ctx_;
  ModelConfig config_;
  TrainingPlanCuda plan_;
  std::unique_ptr<Buffers> buffers_;
};

// Why the GPU does not train this model on sequences of this length; empty when it does.
std::string cuda_training_unsupported(const ModelConfig& config, int64_t length);

}  // namespace twell
