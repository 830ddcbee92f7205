// SPDX-License-Identifier: Apache-2.0
#include "twell/model/training_cuda.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "twell/model/activations_cuda.h"
#include "twell/model/model_cuda.h"
#include "twell/model/qkv.h"
#include "twell/model/rotary.h"
#include "twell/ops/attention/attention_cuda.h"
#include "twell/ops/attention/attention_train_cuda.h"
#include "twell/ops/bias/bias_backward_cuda.h"
#include "twell/ops/embedding/embedding_backward_cuda.h"
#include "twell/ops/embedding/embedding_cuda.h"
#include "twell/ops/matmul/linear_cuda.h"
#include "twell/ops/rms_norm/rms_norm_backward_cuda.h"
#include "twell/ops/rms_norm/rms_norm_cuda.h"
#include "twell/ops/rope/rope_cuda.h"

namespace twell {
namespace {

constexpr int64_t kFloatBytes = static_cast<int64_t>(sizeof(float));

int64_t token_count(MicroBatchShape shape) { return shape.sequences * shape.length; }

FfnTrainShapeCuda ffn_shape(const ModelConfig& config, const TrainingPlanCuda& plan) {
  return {.max_tokens = token_count(plan.shape),
          .width = config.width,
          .ffn = config.ffn,
          .gated = config.gated};
}

// What cuBLAS keeps, and cuDNN's backward: gradients of scores, f32 gradients of queries.
int64_t library_bytes(const ModelConfig& config, MicroBatchShape shape) {
  constexpr int64_t kCublasBytes = int64_t{32} << 20;
  const int64_t padded = (shape.length + 127) / 128 * 128;
  const int64_t scores = config.heads * padded * padded * 2;
  const int64_t queries = token_count(shape) * config.q_width() * kFloatBytes;
  return kCublasBytes + queries +
         std::max(scores, std::min(scores * shape.sequences, kMaxScoreBytes));
}

void require_supported(const ModelConfig& config, MicroBatchShape shape) {
  const std::string why = cuda_training_unsupported(config, shape.length);
  TWELL_REQUIRE(why.empty(), "{}", why);
}

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

template <typename T>
DeviceBuffer<T> to_device(std::span<const T> values) {
  DeviceBuffer<T> buffer(std::ssize(values));
  TWELL_CUDA_CHECK(
      cudaMemcpy(buffer.data(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));  // which our streams do not wait for
  return buffer;
}

}  // namespace

struct TrainingCuda::Buffers {
  Buffers(CudaContext& ctx, const ModelConfig& config, const TrainingPlanCuda& plan)
      : memory(plan_activations(config, plan).bytes),
        views(place_activations(config, plan, memory.data())),
        ffn_workspace(ctx, ffn_shape(config, plan)),
        head(token_count(plan.shape), config.vocab_size),
        embedding(token_count(plan.shape), config.width),
        batch(2 * token_count(plan.shape)),
        slots{StagingSlot(token_count(plan.shape)), StagingSlot(token_count(plan.shape))} {
    for (int64_t layer = 0; layer < config.layers; ++layer) {
      ffn.emplace_back(ctx, ffn_shape(config, plan));  // dense
    }
    const RopeTable table = rope_table(config, plan.shape.length);
    cos = to_device<float>(table.cos.span());
    sin = to_device<float>(table.sin.span());
    std::vector<int32_t> places(static_cast<size_t>(token_count(plan.shape)));
    for (size_t i = 0; i < places.size(); ++i) {
      places[i] = static_cast<int32_t>(i % static_cast<size_t>(plan.shape.length));
    }
    positions = to_device<int32_t>(places);
  }

  DeviceBuffer<std::byte> memory;
  ActivationViewsCuda views;
  std::vector<FfnSavedCuda> ffn;  // [L]
  std::vector<double> ffn_nnz;    // [L] that they were prepared for
  FfnTrainWorkspaceCuda ffn_workspace;
  CrossEntropyWorkspaceCuda head;
  EmbeddingWorkspaceCuda embedding;
  DeviceBuffer<int32_t> batch;      // [2, M] inputs and targets
  DeviceBuffer<float> cos, sin;     // [T, hd / 2]
  DeviceBuffer<int32_t> positions;  // [M]
  std::array<StagingSlot, 2> slots;
  size_t next_slot = 0;
};

// One micro-batch, forward and backward. Each backward function undoes the forward function of the
// same name, last line first.
class TrainingCuda::Pass {
 public:
  Pass(TrainingCuda& training, const TrainingPassCuda& pass)
      : ctx_(training.ctx_),
        config_(training.config_),
        pass_(pass),
        buffers_(*training.buffers_),
        views_(buffers_.views),
        weights_(model_matrices<const BF16>(config_, reinterpret_cast<const BF16*>(pass.weights))),
        grads_(model_matrices<float>(config_, pass.grads)),
        shape_(training.plan_.shape),
        tokens_(token_count(shape_)),
        inputs_(buffers_.batch.data()),
        targets_(buffers_.batch.data() + tokens_),
        keep_normed_(training.plan_.keep_normed) {}

  void run() {
    forward();
    loss(/*backward=*/true);
    backward();
  }
  void evaluate() {
    forward();
    loss(/*backward=*/false);
  }

 private:
  using LayerWeights = LayerMatrices<const BF16>;
  using LayerGrads = LayerMatrices<float>;

  void forward() {
    TWELL_CUDA_CHECK(launch_embedding({.tokens = tokens_,
                                       .width = config_.width,
                                       .ids = inputs_,
                                       .table = device_bf16(weights_.embedding.data),
                                       .out = views_.layers[0].attention_in},
                                      ctx_.stream()));
    done(TrainingStage::kEmbedding);
    for (size_t layer = 0; layer < views_.layers.size(); ++layer) {
      const LayerWeights& w = weights_.layers[layer];
      const LayerActivationsCuda& a = views_.layers[layer];
      if (layer == 0) {
        normed_again(a.attention_in, w.attention_norm, a.attention_normed);
      } else {
        norm_forward(views_.layers[layer - 1].ffn_in, a.attention_in, w.attention_norm,
                     a.attention_normed);
      }
      attention_block_forward(w, a);
      norm_forward(a.attention_in, a.ffn_in, w.ffn_norm, a.ffn_normed);
      feed_forward_forward(layer, w, a);
    }
    norm_forward(views_.layers.back().ffn_in, views_.final_in, weights_.final_norm, views_.normed);
  }

  // The head belongs to the loss, which never holds all logits: its gradients are made here.
  void loss(bool backward) {
    cross_entropy_cuda(ctx_,
                       {.tokens = tokens_,
                        .width = config_.width,
                        .vocab = config_.vocab_size,
                        .x = views_.normed,
                        .weight = device_bf16(weights_.head.data),
                        .targets = targets_,
                        .grad_scale = pass_.grad_scale,
                        .losses = views_.losses,
                        .sum = pass_.loss,
                        .d_x = backward ? views_.d_normed : nullptr,
                        .d_weight = backward ? grads_.head.data : nullptr},
                       buffers_.head);
    done(TrainingStage::kHead);
  }

  void backward() {
    norm_backward(views_.final_in, weights_.final_norm, nullptr, grads_.final_norm);
    for (size_t layer = views_.layers.size(); layer-- > 0;) {
      const LayerWeights& w = weights_.layers[layer];
      const LayerGrads& d = grads_.layers[layer];
      const LayerActivationsCuda& a = views_.layers[layer];
      feed_forward_backward(layer, w, a, d);
      norm_backward(a.ffn_in, w.ffn_norm, views_.d_residual, d.ffn_norm);
      attention_block_backward(w, a, d);
      norm_backward(a.attention_in, w.attention_norm, views_.d_residual, d.attention_norm);
    }
    embedding_backward_cuda(ctx_,
                            {.tokens = tokens_,
                             .width = config_.width,
                             .vocab = config_.vocab_size,
                             .ids = inputs_,
                             .d_out = views_.d_residual,
                             .d_table = grads_.embedding.data},
                            buffers_.embedding);
    done(TrainingStage::kEmbedding);
  }

  // sum = residual + delta; y = norm(sum)
  void norm_forward(const __nv_bfloat16* residual, __nv_bfloat16* sum, const BF16* weight,
                    __nv_bfloat16* y) {
    TWELL_CUDA_CHECK(launch_rms_norm({.tokens = tokens_,
                                      .width = config_.width,
                                      .x = residual,
                                      .residual = views_.delta,
                                      .sum = sum,
                                      .weight = device_bf16(weight),
                                      .y = y,
                                      .eps = eps()},
                                     ctx_.stream()));
    done(TrainingStage::kNorm);
  }

  // y = norm(sum): in front of the first layer, and where backward needs it again.
  void normed_again(const __nv_bfloat16* sum, const BF16* weight, __nv_bfloat16* y) {
    TWELL_CUDA_CHECK(launch_rms_norm({.tokens = tokens_,
                                      .width = config_.width,
                                      .x = sum,
                                      .weight = device_bf16(weight),
                                      .y = y,
                                      .eps = eps()},
                                     ctx_.stream()));
    done(TrainingStage::kNorm);
  }

  // The gradient of the sum is that of its terms: d_residual goes on to both.
  void norm_backward(const __nv_bfloat16* sum, const BF16* weight, const __nv_bfloat16* d_residual,
                     float* d_weight) {
    TWELL_CUDA_CHECK(launch_rms_norm_backward({.tokens = tokens_,
                                               .width = config_.width,
                                               .s = sum,
                                               .weight = device_bf16(weight),
                                               .d_y = views_.d_normed,
                                               .d_residual = d_residual,
                                               .d_s = views_.d_residual,
                                               .d_weight = d_weight,
                                               .partial = views_.partial,
                                               .eps = eps()},
                                              ctx_.stream()));
    done(TrainingStage::kNorm);
  }

  void attention_block_forward(const LayerWeights& w, const LayerActivationsCuda& a) {
    linear_forward(a.attention_normed, w.w_qkv, a.qkv);
    rotate(a.qkv, w.b_qkv, /*inverse=*/false);
    attention_train_forward(
        ctx_,
        {.shape = attention_shape(), .qkv = a.qkv, .out = a.attended, .logsumexp = a.logsumexp});
    linear_forward(a.attended, w.w_o, views_.delta);
    done(TrainingStage::kAttention);
  }

  void attention_block_backward(const LayerWeights& w, const LayerActivationsCuda& a,
                                const LayerGrads& d) {
    linear_backward(a.attended, w.w_o, views_.d_residual, views_.d_attended, d.w_o);
    attention_train_backward(ctx_, {.shape = attention_shape(),
                                    .qkv = a.qkv,
                                    .out = a.attended,
                                    .logsumexp = a.logsumexp,
                                    .d_out = views_.d_attended,
                                    .d_qkv = views_.d_qkv});
    rotate(views_.d_qkv, nullptr, /*inverse=*/true);
    if (d.b_qkv != nullptr) {
      TWELL_CUDA_CHECK(launch_bias_backward({.tokens = tokens_,
                                             .width = qkv_width(config_),
                                             .d_y = views_.d_qkv,
                                             .d_bias = d.b_qkv,
                                             .partial = views_.partial},
                                            ctx_.stream()));
    }
    done(TrainingStage::kAttention);
    if (!keep_normed_) normed_again(a.attention_in, w.attention_norm, a.attention_normed);
    linear_backward(a.attention_normed, w.w_qkv, views_.d_qkv, views_.d_normed, d.w_qkv);
    done(TrainingStage::kAttention);
  }

  void feed_forward_forward(size_t layer, const LayerWeights& w, const LayerActivationsCuda& a) {
    const auto at = static_cast<int64_t>(layer);
    FfnTrainForwardCuda problem;
    problem.tokens = tokens_;
    problem.weights = ffn_weights(w);
    problem.x = a.ffn_normed;
    problem.y = views_.delta;
    if (pass_.counts != nullptr) problem.counts = pass_.counts + at;
    if (pass_.active != nullptr) problem.active = pass_.active + at * config_.ffn;
    if (pass_.before_ffn) pass_.before_ffn(at, problem);
    ffn_train_forward_cuda(ctx_, problem, buffers_.ffn[layer], buffers_.ffn_workspace);
    done(TrainingStage::kFfn);
  }

  void feed_forward_backward(size_t layer, const LayerWeights& w, const LayerActivationsCuda& a,
                             const LayerGrads& d) {
    if (!keep_normed_) normed_again(a.ffn_in, w.ffn_norm, a.ffn_normed);
    ffn_train_backward_cuda(ctx_,
                            {.tokens = tokens_,
                             .weights = ffn_weights(w),
                             .x = a.ffn_normed,
                             .d_y = views_.d_residual,
                             .l1_scale = pass_.l1_scale,
                             .d_x = views_.d_normed,
                             .grads = {.w_gate = d.ffn.w_gate.data,
                                       .w_up = d.ffn.w_up.data,
                                       .w_down = d.ffn.w_down.data}},
                            buffers_.ffn[layer], buffers_.ffn_workspace);
    done(TrainingStage::kFfn);
  }

  void rotate(__nv_bfloat16* qkv, const BF16* bias, bool inverse) {
    TWELL_CUDA_CHECK(launch_rope({.tokens = tokens_,
                                  .heads = config_.heads,
                                  .kv_heads = config_.kv_heads,
                                  .head_dim = config_.head_dim,
                                  .cos = buffers_.cos.data(),
                                  .sin = buffers_.sin.data(),
                                  .positions = buffers_.positions.data(),
                                  .bias = device_bf16(bias),
                                  .qkv = qkv,
                                  .inverse = inverse},
                                 ctx_.stream()));
  }

  void linear_forward(const __nv_bfloat16* x, const Matrix<const BF16>& w, __nv_bfloat16* y) {
    linear_cuda(ctx_, {.rows = tokens_,
                       .cols = w.rows,
                       .inner = w.cols,
                       .x = x,
                       .w = device_bf16(w.data),
                       .y = y});
  }

  void linear_backward(const __nv_bfloat16* x, const Matrix<const BF16>& w,
                       const __nv_bfloat16* d_y, __nv_bfloat16* d_x, const MatrixF& d_w) {
    linear_backward_cuda(ctx_, {.rows = tokens_,
                                .cols = w.rows,
                                .inner = w.cols,
                                .x = x,
                                .w = device_bf16(w.data),
                                .d_y = d_y,
                                .d_x = d_x,
                                .d_w = d_w.data});
  }

  static FfnTrainWeightsCuda ffn_weights(const LayerWeights& w) {
    return {.w_gate = device_bf16(w.ffn.w_gate.data),
            .w_up = device_bf16(w.ffn.w_up.data),
            .w_down = device_bf16(w.ffn.w_down.data)};
  }
  AttentionTrainShape attention_shape() const {
    return {.sequences = shape_.sequences,
            .length = shape_.length,
            .heads = config_.heads,
            .kv_heads = config_.kv_heads,
            .head_dim = config_.head_dim};
  }
  float eps() const { return static_cast<float>(config_.norm_eps); }
  void done(TrainingStage stage) const {
    if (pass_.after_stage) pass_.after_stage(stage);
  }

  CudaContext& ctx_;
  const ModelConfig& config_;
  const TrainingPassCuda& pass_;
  Buffers& buffers_;
  const ActivationViewsCuda& views_;
  const ModelMatrices<const BF16> weights_;
  const ModelMatrices<float> grads_;
  const MicroBatchShape shape_;
  const int64_t tokens_;
  const int32_t* const inputs_;   // [M]
  const int32_t* const targets_;  // [M]
  const bool keep_normed_;
};

TrainingCuda::TrainingCuda(CudaContext& ctx, const ModelConfig& config,
                           const TrainingPlanCuda& plan, int64_t other_bytes)
    : ctx_(ctx), config_(config), plan_(plan) {
  int64_t bytes = other_bytes;
  for (const MemoryItem& item : memory_plan(ctx, config, plan)) bytes += item.bytes;
  require_device_memory(bytes, fmt::format("training micro-batches of {} x {} tokens",
                                           plan.shape.sequences, plan.shape.length));
  buffers_ = std::make_unique<Buffers>(ctx, config_, plan);
  buffers_->ffn_nnz.assign(static_cast<size_t>(config.layers), -1.0);
}

TrainingCuda::~TrainingCuda() {
  if (buffers_ != nullptr) cudaStreamSynchronize(ctx_.stream());
}

std::vector<MemoryItem> TrainingCuda::memory_plan(const CudaContext& ctx, const ModelConfig& config,
                                                  const TrainingPlanCuda& plan) {
  TrainingState::memory_plan(config, plan.shape);  // refuses what is no micro-batch
  require_supported(config, plan.shape);
  const int64_t tokens = token_count(plan.shape);
  const FfnTrainShapeCuda ffn = ffn_shape(config, plan);
  std::vector<MemoryItem> items = plan_activations(config, plan).items;
  items.push_back({"activations: FFN (all layers dense)",
                   config.layers * FfnSavedCuda::bytes_needed(ffn, FfnTrainExecution::kDense, -1)});
  items.push_back({"a feed-forward layer at work", FfnTrainWorkspaceCuda::bytes_needed(ctx, ffn)});
  items.push_back({"logits", CrossEntropyWorkspaceCuda::bytes_needed(tokens, config.vocab_size)});
  items.push_back({"batch, positions, rotations, embedding",
                   EmbeddingWorkspaceCuda::bytes_needed(tokens, config.width) +
                       kFloatBytes * (3 * tokens + plan.shape.length * config.head_dim)});
  items.push_back({"cuDNN and cuBLAS (estimate)", library_bytes(config, plan.shape)});
  return items;
}

bool TrainingCuda::prepare(int64_t layer, FfnTrainExecution execution, double nnz) {
  const auto at = static_cast<size_t>(layer);
  FfnSavedCuda& saved = buffers_->ffn[at];
  double& prepared = buffers_->ffn_nnz[at];
  if (execution == FfnTrainExecution::kDense) {
    if (saved.execution() == execution) return false;
    saved.prepare(ctx_, execution, -1.0);
    prepared = -1.0;
    return true;
  }
  // With room to grow; made anew when that is used up, or half of it would do.
  constexpr double kRoom = 1.25;
  const bool fits = nnz <= prepared && prepared <= 2.0 * kRoom * nnz;
  if (saved.execution() == execution && fits) return false;
  prepared = kRoom * nnz;
  saved.prepare(ctx_, execution, prepared);
  return true;
}

FfnTrainExecution TrainingCuda::execution(int64_t layer) const {
  return buffers_->ffn[static_cast<size_t>(layer)].execution();
}

int64_t TrainingCuda::ffn_saved_bytes() const {
  int64_t bytes = 0;
  for (const FfnSavedCuda& saved : buffers_->ffn) bytes += saved.bytes();
  return bytes;
}

void TrainingCuda::stage(std::span<const int32_t> inputs, std::span<const int32_t> targets) {
  const int64_t tokens = token_count(plan_.shape);
  TWELL_CHECK(std::ssize(inputs) == tokens && std::ssize(targets) == tokens,
              "{} inputs and {} targets for a micro-batch of {} x {} tokens", inputs.size(),
              targets.size(), plan_.shape.sequences, plan_.shape.length);
  const auto check = [&](std::span<const int32_t> ids, int32_t least) {
    for (const int32_t id : ids) {
      TWELL_CHECK(id >= least && id < config_.vocab_size,
                  "token id {} is outside the vocabulary of {}", id, config_.vocab_size);
    }
  };
  check(inputs, 0);
  check(targets, -1);
  const StagingSlot& slot = buffers_->slots[buffers_->next_slot++ % buffers_->slots.size()];
  TWELL_CUDA_CHECK(cudaEventSynchronize(slot.copied()));
  std::copy(inputs.begin(), inputs.end(), slot.data());
  std::copy(targets.begin(), targets.end(), slot.data() + tokens);
  TWELL_CUDA_CHECK(cudaMemcpyAsync(buffers_->batch.data(), slot.data(),
                                   static_cast<size_t>(buffers_->batch.bytes()),
                                   cudaMemcpyHostToDevice, ctx_.stream()));
  TWELL_CUDA_CHECK(cudaEventRecord(slot.copied(), ctx_.stream()));
}

void TrainingCuda::forward_backward(const TrainingPassCuda& pass) { Pass(*this, pass).run(); }

void TrainingCuda::evaluate(const TrainingPassCuda& pass) {
  TrainingPassCuda loss_only;
  loss_only.weights = pass.weights;
  loss_only.loss = pass.loss;
  Pass(*this, loss_only).evaluate();
}

std::string cuda_training_unsupported(const ModelConfig& config, int64_t length) {
  if (config.activation != Activation::kRelu) {
    return "the GPU trains feed-forward layers with ReLU only; use --device cpu";
  }
  if (config.qk_norm) {
    return "the GPU trains no norms over heads (QK-norm) yet; use --device cpu";
  }
  if (std::string why = cuda_model_unsupported(config); !why.empty()) return why;
  const std::string why = attention_train_unsupported(config.head_dim, length);
  return why.empty() ? why : why + "; use --device cpu";
}

}  // namespace twell
