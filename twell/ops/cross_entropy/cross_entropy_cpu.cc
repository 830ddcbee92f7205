// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "twell/base/buffer.h"
#include "twell/base/error.h"
#include "twell/ops/cross_entropy/cross_entropy.h"
#include "twell/ops/cross_entropy/softmax_simd.h"
#include "twell/ops/matmul/matmul.h"

namespace twell {
namespace {

// Tokens per chunk, of which a chunk has so many matrices of logits: 32 MiB at most, but a GEMM has
// at least 256 rows in all (with fewer, rewriting the weight gradient [V, D] in each chunk would
// dominate).
int64_t chunk_tokens(int64_t tokens, int64_t vocab, int64_t matrices = 1) {
  constexpr int64_t kMaxLogits = (int64_t{32} << 20) / static_cast<int64_t>(sizeof(float));
  constexpr int64_t kMinTokens = 256;
  return std::min(tokens, std::max(kMinTokens / matrices, kMaxLogits / matrices / vocab));
}

void check_shapes(ConstMatrixF x, const WeightMatrix& weight, std::span<const int32_t> targets) {
  TWELL_CHECK(x.cols == weight.cols, "x has width {}, the output weight {}", x.cols, weight.cols);
  TWELL_CHECK(weight.rows > 0, "the output weight has no rows");
  TWELL_CHECK(static_cast<int64_t>(targets.size()) == x.rows, "{} targets for {} tokens",
              targets.size(), x.rows);
  for (const int32_t target : targets) {
    TWELL_CHECK(target >= -1 && target < weight.rows, "target {} is outside [-1, {})", target,
                weight.rows);
  }
}

// Calls fn(first token, logits [tokens, V]) for each chunk; the logits may be overwritten.
template <typename Fn>
void for_each_chunk(Context& ctx, ConstMatrixF x, const WeightMatrix& weight, const Fn& fn) {
  Arena::Scope scope(ctx.scratch());
  const int64_t step = chunk_tokens(x.rows, weight.rows);
  const MatrixF buffer = scope.matrix<float>(step, weight.rows);
  for (int64_t begin = 0; begin < x.rows; begin += step) {
    const int64_t count = std::min(step, x.rows - begin);
    const MatrixF logits = buffer.slice_rows(0, count);
    linear_forward(ctx, x.slice_rows(begin, count), weight, logits);
    fn(begin, logits);
  }
}

// Returns the loss of one row of logits [V], and overwrites the row with exp(logit - max).
double row_loss(float* logits, int64_t vocab, int32_t target, RowSoftmax& softmax) {
  const double at_target = static_cast<double>(logits[target]);
  softmax = exp_row(logits, vocab);
  return std::log(softmax.sum) + static_cast<double>(softmax.max) - at_target;
}

// The same for a token that may have no target; overwrites the row with d_logits.
double row_loss_and_gradient(float* logits, int64_t vocab, int32_t target, float grad_scale) {
  if (target < 0) {
    std::fill_n(logits, vocab, 0.0f);
    return 0.0;
  }
  RowSoftmax softmax;
  const double loss = row_loss(logits, vocab, target, softmax);
  scale_row(logits, vocab, static_cast<float>(static_cast<double>(grad_scale) / softmax.sum));
  logits[target] -= grad_scale;
  return loss;
}

double row_loss_only(float* logits, int64_t vocab, int32_t target) {
  RowSoftmax softmax;
  return target < 0 ? 0.0 : row_loss(logits, vocab, target, softmax);
}

void check_gradients(const CrossEntropy& problem) {
  const MatrixF& d_x = problem.d_x;
  const MatrixF& d_weight = problem.d_weight;
  TWELL_CHECK(d_x.empty() == d_weight.empty(), "cross-entropy needs both gradients or neither");
  if (d_x.empty()) return;
  TWELL_CHECK(d_x.rows == problem.x.rows && d_x.cols == problem.x.cols,
              "d_x is [{}, {}], x [{}, {}]", d_x.rows, d_x.cols, problem.x.rows, problem.x.cols);
  TWELL_CHECK(d_weight.rows == problem.weight.rows && d_weight.cols == problem.weight.cols,
              "d_weight is [{}, {}], weight [{}, {}]", d_weight.rows, d_weight.cols,
              problem.weight.rows, problem.weight.cols);
}

void check_distillation(const Distillation& p) {
  check_shapes(p.x, p.weight, p.targets);
  TWELL_CHECK(p.teacher_x.cols == p.teacher_weight.cols, "teacher_x has width {}, its weight {}",
              p.teacher_x.cols, p.teacher_weight.cols);
  TWELL_CHECK(p.weight.rows == p.teacher_weight.rows, "vocabularies of {} and {} tokens",
              p.weight.rows, p.teacher_weight.rows);
  TWELL_CHECK(p.x.rows == p.teacher_x.rows, "{} tokens, {} of the teacher", p.x.rows,
              p.teacher_x.rows);
  TWELL_CHECK(p.d_x.rows == p.x.rows && p.d_x.cols == p.x.cols, "d_x is [{}, {}]", p.d_x.rows,
              p.d_x.cols);
  TWELL_CHECK(p.share >= 0.0f && p.share <= 1.0f, "a share of {}", p.share);
}

struct DistilledLoss {
  double ce = 0.0, kl = 0.0;
};

// model and teacher [V] hold logits; model becomes the gradient, teacher is overwritten.
DistilledLoss distill_row(const Distillation& p, int32_t target, float* model, float* teacher) {
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
  const DistilledLoss loss{log_sum_model - at_target,
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

int64_t cross_entropy_scratch_bytes(int64_t tokens, int64_t vocab) {
  return chunk_tokens(tokens, vocab) * vocab * static_cast<int64_t>(sizeof(float)) +
         tokens * static_cast<int64_t>(sizeof(double));
}

CrossEntropyResult cross_entropy(Context& ctx, const CrossEntropy& problem) {
  const ConstMatrixF x = problem.x;
  const std::span<const int32_t> targets = problem.targets;
  check_shapes(x, problem.weight, targets);
  check_gradients(problem);
  const bool backward = !problem.d_x.empty();

  Arena::Scope scope(ctx.scratch());
  double* const losses = scope.alloc<double>(x.rows);
  for_each_chunk(ctx, x, problem.weight, [&](int64_t first, MatrixF logits) {
    ctx.parallel_for(logits.rows, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t m = begin; m < end; ++m) {
        const int32_t target = targets[static_cast<size_t>(first + m)];
        float* const row = logits.row(m);
        losses[first + m] =
            backward ? row_loss_and_gradient(row, logits.cols, target, problem.grad_scale)
                     : row_loss_only(row, logits.cols, target);
      }
    });
    if (!backward) return;
    linear_backward(ctx, {.x = x.slice_rows(first, logits.rows),
                          .weight = problem.weight,
                          .d_y = logits,
                          .d_x = problem.d_x.slice_rows(first, logits.rows),
                          .d_weight = problem.d_weight});
  });

  CrossEntropyResult result;
  for (int64_t m = 0; m < x.rows; ++m) {
    result.loss_sum += losses[m];
    result.tokens += targets[static_cast<size_t>(m)] >= 0 ? 1 : 0;
  }
  return result;
}

void token_losses(Context& ctx, ConstMatrixF x, const WeightMatrix& weight,
                  std::span<const int32_t> targets, std::span<float> losses) {
  check_shapes(x, weight, targets);
  TWELL_CHECK(losses.size() == targets.size(), "{} losses for {} targets", losses.size(),
              targets.size());
  for_each_chunk(ctx, x, weight, [&](int64_t first, MatrixF logits) {
    ctx.parallel_for(logits.rows, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t m = begin; m < end; ++m) {
        const size_t token = static_cast<size_t>(first + m);
        losses[token] =
            static_cast<float>(row_loss_only(logits.row(m), logits.cols, targets[token]));
      }
    });
  });
}

DistillationResult distill(Context& ctx, const Distillation& problem) {
  check_distillation(problem);
  Arena::Scope scope(ctx.scratch());
  const int64_t tokens = problem.x.rows, vocab = problem.weight.rows;
  DistilledLoss* const losses = scope.alloc<DistilledLoss>(tokens);
  const int64_t step = chunk_tokens(tokens, vocab, 2);
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
        losses[begin + m] = distill_row(problem, problem.targets[static_cast<size_t>(begin + m)],
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
