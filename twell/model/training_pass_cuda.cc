// SPDX-License-Identifier: Apache-2.0
// The training pass on the GPU: training.cc's functions in the same order, with bf16 ops.
#include "twell/model/model_cuda.h"
#include "twell/model/qkv.h"
#include "twell/model/training_buffers_cuda.h"
#include "twell/ops/attention/attention_train_cuda.h"
#include "twell/ops/bias/bias_cuda.h"
#include "twell/ops/embedding/embedding_cuda.h"
#include "twell/ops/matmul/linear_cuda.h"
#include "twell/ops/rms_norm/rms_norm_cuda.h"
#include "twell/ops/rope/rope_cuda.h"

namespace twell {

// Forward and backward of one micro-batch. Each backward function mirrors the forward function of
// the same name in reverse order.
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
        recompute_(training.plan_.recompute) {}

  void run() {
    if (!pass_.add) clear_added_gradients();
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
    if (views_.mask != nullptr) {
      TWELL_CUDA_CHECK(launch_document_mask({.sequences = shape_.sequences,
                                             .length = shape_.length,
                                             .begins = targets_ + tokens_,
                                             .mask = views_.mask},
                                            ctx_.stream()));
      done(TrainingStage::kAttention);
    }
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
        norm(a.attention_in, w.attention_norm, a.attention_normed);
      } else {
        norm(views_.layers[layer - 1].ffn_in, w.attention_norm, a.attention_normed, a.attention_in);
      }
      attention_block_forward(w, a);
      norm(a.attention_in, w.ffn_norm, a.ffn_normed, a.ffn_in);
      feed_forward_forward(layer, w, a);
    }
    norm(views_.layers.back().ffn_in, weights_.final_norm, views_.normed, views_.final_in);
  }

  // The loss includes the head, never stores all logits, and also computes the head's gradients.
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
                        .d_weight = backward ? grads_.head.data : nullptr,
                        .add = pass_.add},
                       *buffers_.head);
    done(TrainingStage::kHead);
  }

  void backward() {
    norm_backward(views_.final_in, weights_.final_norm, nullptr, grads_.final_norm);
    backward_done(config_.layers);
    for (size_t layer = views_.layers.size(); layer-- > 0;) {
      const LayerWeights& w = weights_.layers[layer];
      const LayerGrads& d = grads_.layers[layer];
      const LayerActivationsCuda& a = views_.layers[layer];
      const RecomputeLevel level = recompute_.of_layer(static_cast<int64_t>(layer));
      ffn_input_again(level, w, a);
      feed_forward_backward(layer, w, a, d);
      norm_backward(a.ffn_in, w.ffn_norm, views_.d_residual, d.ffn_norm);
      attention_block_backward(level, w, a, d);
      norm_backward(a.attention_in, w.attention_norm, views_.d_residual, d.attention_norm);
      backward_done(static_cast<int64_t>(layer));
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
    backward_done(-1);
  }

  // y = norm(x), or where `sum` is given, sum = x + delta and y = norm(sum).
  void norm(const __nv_bfloat16* x, const BF16* weight, __nv_bfloat16* y,
            __nv_bfloat16* sum = nullptr) {
    TWELL_CUDA_CHECK(launch_rms_norm({.tokens = tokens_,
                                      .width = config_.width,
                                      .x = x,
                                      .residual = sum == nullptr ? nullptr : views_.delta,
                                      .sum = sum,
                                      .weight = device_bf16(weight),
                                      .y = y,
                                      .eps = eps()},
                                     ctx_.stream()));
    done(TrainingStage::kNorm);
  }

  // Both terms of the sum have its gradient d_residual.
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
    project_qkv(w, a);
    attention_train_forward(ctx_, {.shape = attention_shape(),
                                   .qkv = a.qkv,
                                   .out = a.attended,
                                   .logsumexp = a.logsumexp,
                                   .mask = views_.mask});
    linear_forward(a.attended, w.w_o, views_.delta);
    done(TrainingStage::kAttention);
  }

  void project_qkv(const LayerWeights& w, const LayerActivationsCuda& a) {
    linear_forward(a.attention_normed, w.w_qkv, a.qkv);
    rotate(a.qkv, w.b_qkv, /*inverse=*/false);
    done(TrainingStage::kProjections);
  }

  void attention_block_backward(RecomputeLevel level, const LayerWeights& w,
                                const LayerActivationsCuda& a, const LayerGrads& d) {
    linear_backward(a.attended, w.w_o, views_.d_residual, views_.d_attended, d.w_o);
    done(TrainingStage::kProjections);
    if (level >= RecomputeLevel::kNorms) {
      norm(a.attention_in, w.attention_norm, a.attention_normed);
    }
    if (level >= RecomputeLevel::kQkv) project_qkv(w, a);
    attention_train_backward(ctx_, {.shape = attention_shape(),
                                    .qkv = a.qkv,
                                    .out = a.attended,
                                    .logsumexp = a.logsumexp,
                                    .d_out = views_.d_attended,
                                    .d_qkv = views_.d_qkv,
                                    .mask = views_.mask});
    done(TrainingStage::kAttention);
    rotate(views_.d_qkv, nullptr, /*inverse=*/true);
    if (d.b_qkv != nullptr) {
      TWELL_CUDA_CHECK(launch_bias_backward({.tokens = tokens_,
                                             .width = qkv_width(config_),
                                             .d_y = views_.d_qkv,
                                             .d_bias = d.b_qkv,
                                             .partial = views_.partial},
                                            ctx_.stream()));
    }
    linear_backward(a.attention_normed, w.w_qkv, views_.d_qkv, views_.d_normed, d.w_qkv);
    done(TrainingStage::kProjections);
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
    ffn_train_forward_cuda(ctx_, problem, buffers_.ffn[layer], *buffers_.ffn_workspace);
    done(TrainingStage::kFfn);
  }

  void ffn_input_again(RecomputeLevel level, const LayerWeights& w, const LayerActivationsCuda& a) {
    if (level >= RecomputeLevel::kInputs) {
      linear_forward(a.attended, w.w_o, views_.delta);
      done(TrainingStage::kProjections);
      norm(a.attention_in, w.ffn_norm, a.ffn_normed, a.ffn_in);
    } else if (level == RecomputeLevel::kNorms) {
      norm(a.ffn_in, w.ffn_norm, a.ffn_normed);
    }
  }

  void feed_forward_backward(size_t layer, const LayerWeights& w, const LayerActivationsCuda& a,
                             const LayerGrads& d) {
    ffn_train_backward_cuda(ctx_,
                            {.tokens = tokens_,
                             .weights = ffn_weights(w),
                             .x = a.ffn_normed,
                             .d_y = views_.d_residual,
                             .l1_scale = pass_.l1_scale,
                             .d_x = views_.d_normed,
                             .grads = {.w_gate = d.ffn.w_gate.data,
                                       .w_up = d.ffn.w_up.data,
                                       .w_down = d.ffn.w_down.data,
                                       .add = pass_.add}},
                            buffers_.ffn[layer], *buffers_.ffn_workspace);
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
                                .d_w = d_w.data,
                                .d_w_add = pass_.add});
  }

  // Clears the gradients to which ops only add; matrix products can overwrite theirs. If embedding
  // and head share a matrix, the head overwrites its gradient first.
  void clear_added_gradients() {
    const auto clear = [&](float* from, int64_t count) {
      if (from == nullptr) return;
      TWELL_CUDA_CHECK(
          cudaMemsetAsync(from, 0, static_cast<size_t>(count) * sizeof(float), ctx_.stream()));
    };
    if (grads_.embedding.data != grads_.head.data) {
      clear(grads_.embedding.data, config_.vocab_size * config_.width);
    }
    for (const LayerGrads& d : grads_.layers) {
      clear(d.attention_norm, config_.width);
      clear(d.ffn_norm, config_.width);
      clear(d.b_qkv, qkv_width(config_));
    }
    clear(grads_.final_norm, config_.width);
  }

  FfnTrainWeightsCuda ffn_weights(const LayerWeights& w) const {
    return {.w_gate = device_bf16(w.ffn.w_gate.data),
            .w_up = device_bf16(w.ffn.w_up.data),
            .w_down = device_bf16(w.ffn.w_down.data),
            .activation = config_.activation};
  }
  AttentionTrainShape attention_shape() const {
    return {.sequences = shape_.sequences,
            .length = shape_.length,
            .heads = config_.heads,
            .kv_heads = config_.kv_heads,
            .head_dim = config_.head_dim,
            .document_mask = views_.mask != nullptr};
  }
  float eps() const { return static_cast<float>(config_.norm_eps); }
  void backward_done(int64_t layer) const {
    if (pass_.after_backward) pass_.after_backward(layer);
  }
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
  const Recompute recompute_;
};

void TrainingCuda::forward_backward(const TrainingPassCuda& pass) { Pass(*this, pass).run(); }

void TrainingCuda::evaluate(const TrainingPassCuda& pass) {
  TrainingPassCuda loss_only;
  loss_only.weights = pass.weights;
  loss_only.loss = pass.loss;
  Pass(*this, loss_only).evaluate();
}

}  // namespace twell
