// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "twell/base/error.h"
#include "twell/ops/cross_entropy/distillation.h"
#include "twell/ops/cross_entropy/softmax_simd.h"
#include "twell/ops/matmul/matmul.h"

namespace twell {
namespace {

// A chunk has two matrices of logits, at most 32 MiB together, but enough tokens for a GEMM.
int64_t pair_chunk_tokens(int64_t tokens, int64_t vocab) {
  constexpr int64_t kMaxLogits = (int64_t{16} << 20) / static_cast<int64_t>(sizeof(float));
  constexpr int64_t kMinTokens = 128;
  return std::min(tokens, std::max(kMinTokens, kMaxLogits / vocab));
}

void check_shapes(const Distillation& p) {
  TWELL_CHECK(p.x.cols == p.weight.cols && p.teacher_x.cols == p.teacher_weight.cols,
              "hidden states of width {} and {}, output weights of {} and {}", p.x.cols,
              p.teacher_x.cols, p.weight.cols, p.teacher_weight.cols);
  TWELL_CHECK(p.weight.rows == p.teacher_weight.rows, "vocabularies of {} and {} tokens",
              p.weight.rows, p.teacher_weight.rows);
  TWELL_CHECK(p.x.rows == p.teacher_x.rows && std::ssize(p.targets) == p.x.rows,
              "{} tokens, {} of the teacher, {} targets", p.x.rows, p.teacher_x.rows,
              p.targets.size());
  TWELL_CHECK(p.d_x.rows == p.x.rows && p.d_x.cols == p.x.cols, "d_x is [{}, {}]", p.d_x.rows,
              p.d_x.cols);
  TWELL_CHECK(p.share >= 0.0f && p.share <= 1.0f, "a share of {}", p.share);
  for (const int32_t target : p.targets) {
    TWELL_CHECK(target >= -1 && target < p.weight.rows, "target {} is outside [-1, {})", target,
                p.weight.rows);
  }
}

struct RowLoss {
  double ce = 0.0, kl = 0.0;
};

// model and teacher [V] hold logits; model becomes the gradient, teacher is overwritten.
RowLoss row_loss(const Distillation& p, int32_t target, float* model, float* teacher) {
  const int64_t vocab = p.weight.rows;
  if (target < 0) {
    std::fill_n(model, vocab, 0.0f);
    return {};
  }
  // sum p_t (log p_t - log p_m): first the logit differences, before the logits are overwritten.
  const double at_target = static_cast<double>(model[target]);
  double max_t = -INFINITY, weighted = 0.0, sum_t = 0.0;
  for (int64_t v = 0; v < vocab; ++v) max_t = std::max(max_t, static_cast<double>(teacher[v]));
  for (int64_t v = 0; v < vocab; ++v) {
    const double difference = static_cast<double>(teacher[v]) - static_cast<double>(model[v]);
    const float e = std::exp(teacher[v] - static_cast<float>(max_t));
    teacher[v] = e;
    sum_t += static_cast<double>(e);
    weighted += static_cast<double>(e) * difference;
  }
  const RowSoftmax softmax = exp_row(model, vocab);
  const double log_sum_model = std::log(softmax.sum) + static_cast<double>(softmax.max);
  const RowLoss loss{log_sum_model - at_target,
                     weighted / sum_t - (std::log(sum_t) + max_t) + log_sum_model};
  // scale * (p_m - (1 - share) onehot - share p_t)
  const double scale = static_cast<double>(p.grad_scale);
  const float of_model = static_cast<float>(scale / softmax.sum);
  const float of_teacher = static_cast<float>(scale * static_cast<double>(p.share) / sum_t);
  for (int64_t v = 0; v < vocab; ++v) model[v] = of_model * model[v] - of_teacher * teacher[v];
  model[target] -= p.grad_scale * (1.0f - p.share);
  return loss;
}

}  // namespace

DistillationResult distill(Context& ctx, const Distillation& problem) {
  check_shapes(problem);
  Arena::Scope scope(ctx.scratch());
  const int64_t tokens = problem.x.rows, vocab = problem.weight.rows;
  RowLoss* const losses = scope.alloc<RowLoss>(tokens);
  const int64_t step = pair_chunk_tokens(tokens, vocab);
  const MatrixF model_buffer = scope.matrix<float>(step, vocab);
  const MatrixF teacher_buffer = scope.matrix<float>(step, vocab);
  for (int64_t begin = 0; begin < tokens; begin += step) {
    const int64_t count = std::min(step, tokens - begin);
    const MatrixF model = model_buffer.slice_rows(0, count);
    const MatrixF teacher = teacher_buffer.slice_rows(0, count);
    linear_forward(ctx, problem.x.slice_rows(begin, count), problem.weight, model);
    linear_forward(ctx, problem.teacher_x.slice_rows(begin, count), problem.teacher_weight,
                   teacher);
    ctx.parallel_for(count, 1, [&](int64_t first, int64_t last, int) {
      for (int64_t m = first; m < last; ++m) {
        losses[begin + m] = row_loss(problem, problem.targets[static_cast<size_t>(begin + m)],
                                     model.row(m), teacher.row(m));
      }
    });
    linear_backward(ctx, {.x = problem.x.slice_rows(begin, count),
                          .weight = problem.weight,
                          .d_y = model,
                          .d_x = problem.d_x.slice_rows(begin, count),
                          .d_weight = problem.d_weight});
  }
  DistillationResult result;
  for (int64_t m = 0; m < tokens; ++m) {
    result.ce_sum += losses[m].ce;
    result.kl_sum += losses[m].kl;
    result.tokens += problem.targets[static_cast<size_t>(m)] >= 0 ? 1 : 0;
  }
  return result;
}

}  // namespace twell
