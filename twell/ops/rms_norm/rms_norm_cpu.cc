// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/rms_norm/rms_norm.h"

#include <algorithm>
#include <cmath>

#include "twell/base/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "twell/ops/rms_norm/rms_norm_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace twell {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

// s = x + residual (s = x without one); returns sum(s^2). s may be x.
float add_square(const float* x, const float* residual, float* s, int64_t n) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  auto sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  int64_t i = 0;
  const auto step = [&](int64_t at, auto& sum) HWY_ATTR {
    auto v = hn::LoadU(d, x + at);
    if (residual != nullptr) {
      v = hn::Add(v, hn::LoadU(d, residual + at));
      hn::StoreU(v, d, s + at);
    }
    sum = hn::MulAdd(v, v, sum);
  };
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    step(i, sum0);
    step(i + lanes, sum1);
  }
  for (; i + lanes <= n; i += lanes) step(i, sum0);
  float total = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
  for (; i < n; ++i) {
    float v = x[i];
    if (residual != nullptr) s[i] = v = v + residual[i];
    total += v * v;
  }
  return total;
}

// y = s * inv * weight
void scale_row(const float* s, float inv, const float* weight, float* y, int64_t n) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto inv_v = hn::Set(d, inv);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(hn::Mul(hn::Mul(hn::LoadU(d, s + i), inv_v), hn::LoadU(d, weight + i)), d, y + i);
  }
  for (; i < n; ++i) y[i] = s[i] * inv * weight[i];
}

// d_weight += d_y * s * inv; returns sum(d_y * weight * s).
float weight_gradient(const float* s, float inv, const float* weight, const float* d_y,
                      float* d_weight, int64_t n) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto inv_v = hn::Set(d, inv);
  auto sum = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto product = hn::Mul(hn::LoadU(d, d_y + i), hn::LoadU(d, s + i));
    sum = hn::MulAdd(product, hn::LoadU(d, weight + i), sum);
    hn::StoreU(hn::MulAdd(product, inv_v, hn::LoadU(d, d_weight + i)), d, d_weight + i);
  }
  float total = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; i < n; ++i) {
    total += d_y[i] * s[i] * weight[i];
    d_weight[i] += d_y[i] * s[i] * inv;
  }
  return total;
}

// d_s += inv * d_y * weight - shrink * s
void input_gradient(const float* s, float inv, float shrink, const float* weight, const float* d_y,
                    float* d_s, int64_t n) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto inv_v = hn::Set(d, inv);
  const auto shrink_v = hn::Set(d, shrink);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto g = hn::Mul(hn::LoadU(d, d_y + i), hn::LoadU(d, weight + i));
    const auto v = hn::NegMulAdd(shrink_v, hn::LoadU(d, s + i), hn::Mul(inv_v, g));
    hn::StoreU(hn::Add(hn::LoadU(d, d_s + i), v), d, d_s + i);
  }
  for (; i < n; ++i) d_s[i] += inv * (d_y[i] * weight[i]) - shrink * s[i];
}

}  // namespace

void forward_rows(const RmsNormForward& p, int64_t begin, int64_t end) {
  const int64_t width = p.x.cols;
  for (int64_t m = begin; m < end; ++m) {
    const bool add = !p.residual.empty();
    const float squares = add_square(p.x.row(m), add ? p.residual.row(m) : nullptr,
                                     add ? p.sum.row(m) : nullptr, width);
    const float inv = 1.0f / std::sqrt(squares / static_cast<float>(width) + p.eps);
    scale_row(add ? p.sum.row(m) : p.x.row(m), p.scale * inv, p.weight, p.y.row(m), width);
    if (p.inv_rms != nullptr) p.inv_rms[m] = inv;
  }
}

// d_weight [D] covers these rows only.
void backward_rows(const RmsNormBackward& p, int64_t begin, int64_t end, float* d_weight) {
  const int64_t width = p.s.cols;
  for (int64_t m = begin; m < end; ++m) {
    const float inv = p.inv_rms[m];
    const float scaled = p.scale * inv;
    const float dot = weight_gradient(p.s.row(m), scaled, p.weight, p.d_y.row(m), d_weight, width);
    const float shrink = dot * scaled * inv * inv / static_cast<float>(width);
    input_gradient(p.s.row(m), scaled, shrink, p.weight, p.d_y.row(m), p.d_s.row(m), width);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace twell
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twell {
HWY_EXPORT(forward_rows);
HWY_EXPORT(backward_rows);

namespace {

// Rows whose weight gradients form one partial sum. Constant, so that the order of summation does
// not depend on the number of threads; 64 keep the partial sums under 2% of s.
constexpr int64_t kChunk = 64;

void check_shape(const char* name, ConstMatrixF matrix, ConstMatrixF like) {
  TWELL_CHECK(matrix.rows == like.rows && matrix.cols == like.cols,
              "rms_norm: {} is [{}, {}], the input [{}, {}]", name, matrix.rows, matrix.cols,
              like.rows, like.cols);
}

}  // namespace

void rms_norm_forward(Context& ctx, const RmsNormForward& problem) {
  check_shape("y", problem.y, problem.x);
  if (!problem.residual.empty()) {
    check_shape("residual", problem.residual, problem.x);
    check_shape("sum", problem.sum, problem.x);
  }
  ctx.parallel_for(problem.x.rows, 16, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(forward_rows)(problem, begin, end);
  });
}

void rms_norm_backward(Context& ctx, const RmsNormBackward& problem) {
  check_shape("d_y", problem.d_y, problem.s);
  check_shape("d_s", problem.d_s, problem.s);
  const int64_t rows = problem.s.rows, width = problem.s.cols;
  const int64_t chunks = (rows + kChunk - 1) / kChunk;
  Arena::Scope scope(ctx.scratch());
  const MatrixF partial = scope.matrix<float>(chunks, width);
  ctx.parallel_for(chunks, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      std::fill_n(partial.row(chunk), width, 0.0f);
      HWY_DYNAMIC_DISPATCH(backward_rows)
      (problem, chunk * kChunk, std::min(rows, (chunk + 1) * kChunk), partial.row(chunk));
    }
  });
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const float* from = partial.row(chunk);
    for (int64_t i = 0; i < width; ++i) problem.d_weight[i] += from[i];
  }
}

namespace {

template <typename T>
Matrix<T> head_of(Matrix<T> x, int64_t head_dim, int64_t head) {
  return {x.data + head * head_dim, x.rows, head_dim, x.stride};
}

float* of_head(float* inv_rms, int64_t rows, int64_t head) {
  return inv_rms == nullptr ? nullptr : inv_rms + head * rows;
}

}  // namespace

void head_norm_forward(Context& ctx, MatrixF x, int64_t head_dim, const float* weight, float eps,
                       float* inv_rms) {
  for (int64_t head = 0; head < x.cols / head_dim; ++head) {
    const MatrixF part = head_of(x, head_dim, head);
    // In place is safe, because a row is squared before it is written.
    rms_norm_forward(ctx, {.x = part,
                           .weight = weight,
                           .y = part,
                           .inv_rms = of_head(inv_rms, x.rows, head),
                           .eps = eps});
  }
}

void head_norm_backward(Context& ctx, const HeadNormBackward& problem) {
  const auto& [x, head_dim, weight, inv_rms, d, d_weight] = problem;
  Arena::Scope scope(ctx.scratch());
  const MatrixF d_x = scope.matrix<float>(x.rows, head_dim);
  for (int64_t head = 0; head < x.cols / head_dim; ++head) {
    const MatrixF d_part = head_of(d, head_dim, head);
    std::fill_n(d_x.data, d_x.rows * d_x.cols, 0.0f);
    rms_norm_backward(ctx, {.s = head_of(x, head_dim, head),
                            .weight = weight,
                            .inv_rms = inv_rms + head * x.rows,
                            .d_y = d_part,
                            .d_s = d_x,
                            .d_weight = d_weight});
    for (int64_t m = 0; m < x.rows; ++m) std::copy_n(d_x.row(m), head_dim, d_part.row(m));
  }
}

}  // namespace twell
#endif  // HWY_ONCE
