// SPDX-License-Identifier: Apache-2.0
#include "twell/model/head_norm.h"

#include <algorithm>

#include "twell/ops/rms_norm/rms_norm.h"

namespace twell {
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
