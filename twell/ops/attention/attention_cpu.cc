// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "twell/base/error.h"
#include "twell/ops/attention/attention.h"

namespace twell {
namespace {

void check_shapes(const AttentionShape& shape, std::span<const AttentionSequence> sequences,
                  ConstMatrixF q, ConstMatrixF out) {
  const auto [heads, kv_heads, head_dim] = shape;
  TWELL_CHECK(heads > 0 && kv_heads > 0 && head_dim > 0 && heads % kv_heads == 0,
              "attention: {} heads on {} key/value heads of {}", heads, kv_heads, head_dim);
  TWELL_CHECK(q.cols == heads * head_dim && out.cols == q.cols && out.rows == q.rows,
              "attention: q [{}, {}] and out [{}, {}] for {} heads of {}", q.rows, q.cols, out.rows,
              out.cols, heads, head_dim);
  for (const AttentionSequence& s : sequences) {
    TWELL_CHECK(s.q_begin >= 0 && s.q_len >= 0 && s.q_begin + s.q_len <= q.rows,
                "attention: queries {}..{} of {} rows", s.q_begin, s.q_begin + s.q_len, q.rows);
    TWELL_CHECK(s.k.cols == kv_heads * head_dim && s.v.cols == s.k.cols && s.k.rows == s.v.rows &&
                    s.k.rows >= s.q_len,
                "attention: k [{}, {}] and v [{}, {}] for {} queries, {} heads of {}", s.k.rows,
                s.k.cols, s.v.rows, s.v.cols, s.q_len, kv_heads, head_dim);
  }
}

float dot(const float* a, const float* b, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void add_scaled(float scale, const float* x, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] += scale * x[i];
}

int64_t longest(std::span<const AttentionSequence> sequences) {
  int64_t rows = 0;
  for (const AttentionSequence& s : sequences) rows = std::max(rows, s.k.rows);
  return rows;
}

// One query row of one head; scores [keys] is scratch.
void forward_row(const AttentionForward& p, const AttentionSequence& s, int64_t head, int64_t i,
                 float* scores) {
  const int64_t hd = p.shape.head_dim;
  const int64_t at = head / (p.shape.heads / p.shape.kv_heads) * hd;
  const int64_t keys = s.k.rows - s.q_len + i + 1;
  const float scale = 1.0f / std::sqrt(static_cast<float>(hd));
  const float* q = p.q.row(s.q_begin + i) + head * hd;
  float* out = p.out.row(s.q_begin + i) + head * hd;
  for (int64_t j = 0; j < keys; ++j) scores[j] = scale * dot(q, s.k.row(j) + at, hd);
  const float max = *std::max_element(scores, scores + keys);
  float sum = 0;
  for (int64_t j = 0; j < keys; ++j) sum += scores[j] = std::exp(scores[j] - max);
  std::fill_n(out, hd, 0.0f);
  for (int64_t j = 0; j < keys; ++j) add_scaled(scores[j] / sum, s.v.row(j) + at, out, hd);
  if (p.logsumexp != nullptr) {
    p.logsumexp[(s.q_begin + i) * p.shape.heads + head] = max + std::log(sum);
  }
}

void backward_head(const AttentionBackward& p, const AttentionSequence& s, int64_t head) {
  const int64_t hd = p.shape.head_dim;
  const int64_t at = head / (p.shape.heads / p.shape.kv_heads) * hd;
  const float scale = 1.0f / std::sqrt(static_cast<float>(hd));
  for (int64_t i = 0; i < s.q_len; ++i) {
    const int64_t m = s.q_begin + i;
    const float* q = p.q.row(m) + head * hd;
    const float* d_out = p.d_out.row(m) + head * hd;
    float* d_q = p.d_q.row(m) + head * hd;
    std::fill_n(d_q, hd, 0.0f);
    const float delta = dot(p.out.row(m) + head * hd, d_out, hd);
    const float logsumexp = p.logsumexp[m * p.shape.heads + head];
    for (int64_t j = 0; j <= i; ++j) {
      const float weight = std::exp(scale * dot(q, s.k.row(j) + at, hd) - logsumexp);
      const float d_score = weight * (dot(d_out, s.v.row(j) + at, hd) - delta) * scale;
      add_scaled(weight, d_out, p.d_v.row(s.q_begin + j) + at, hd);
      add_scaled(d_score, q, p.d_k.row(s.q_begin + j) + at, hd);
      add_scaled(d_score, s.k.row(j) + at, d_q, hd);
    }
  }
}

}  // namespace

void attention_forward(Context& ctx, const AttentionForward& problem) {
  check_shapes(problem.shape, problem.sequences, problem.q, problem.out);
  Arena::Scope scope(ctx.scratch());
  const MatrixF scores = scope.matrix<float>(ctx.threads(), longest(problem.sequences));
  for (const AttentionSequence& sequence : problem.sequences) {
    ctx.parallel_for(problem.shape.heads, 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t head = begin; head < end; ++head) {
        for (int64_t i = 0; i < sequence.q_len; ++i) {
          forward_row(problem, sequence, head, i, scores.row(thread));
        }
      }
    });
  }
}

void attention_backward(Context& ctx, const AttentionBackward& problem) {
  check_shapes(problem.shape, problem.sequences, problem.q, problem.out);
  const auto [heads, kv_heads, head_dim] = problem.shape;
  const int64_t group = heads / kv_heads;
  for (const AttentionSequence& sequence : problem.sequences) {
    TWELL_CHECK(sequence.k.rows == sequence.q_len, "attention backward: {} keys for {} queries",
                sequence.k.rows, sequence.q_len);
    ctx.parallel_for(kv_heads, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t kv_head = begin; kv_head < end; ++kv_head) {
        for (int64_t j = 0; j < sequence.q_len; ++j) {
          std::fill_n(problem.d_k.row(sequence.q_begin + j) + kv_head * head_dim, head_dim, 0.0f);
          std::fill_n(problem.d_v.row(sequence.q_begin + j) + kv_head * head_dim, head_dim, 0.0f);
        }
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
          backward_head(problem, sequence, head);
        }
      }
    });
  }
}

}  // namespace twell
