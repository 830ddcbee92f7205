// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/muon/muon.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "twell/base/error.h"
#include "twell/ops/adamw/adamw.h"
#include "twell/ops/matmul/matmul.h"

namespace twell {
namespace {

constexpr int64_t kGrain = 1 << 14;  // below this a second thread costs more than it saves

}  // namespace

MuonCoefficients muon_coefficients(const Muon& options) {
  return {
      .grad_scale = static_cast<float>(options.grad_scale),
      .momentum = static_cast<float>(options.momentum),
      .one_minus_momentum = static_cast<float>(1.0 - options.momentum),
      .decay = static_cast<float>(1.0 - options.learning_rate * options.weight_decay),
      .step_size = static_cast<float>(0.2 * options.learning_rate),
  };
}

void muon_momentum(Context& ctx, const MuonCoefficients& c, std::span<float> grad,
                   std::span<float> exp_avg) {
  TWELL_CHECK(grad.size() == exp_avg.size(), "Muon: {} gradients for {} moments", grad.size(),
              exp_avg.size());
  ctx.parallel_for(std::ssize(grad), kGrain, [&](int64_t begin, int64_t end, int) {
    float* const g = grad.data();
    float* const m = exp_avg.data();
    for (int64_t i = begin; i < end; ++i) {
      const float own = c.one_minus_momentum * (c.grad_scale * g[i]);
      m[i] = std::fma(c.momentum, m[i], own);
      g[i] = std::fma(c.momentum, m[i], own);
    }
  });
}

void orthogonalise(Context& ctx, MatrixF matrix) {
  TWELL_CHECK(matrix.stride == matrix.cols, "a matrix of {} columns with a stride of {}",
              matrix.cols, matrix.stride);
  const int64_t count = matrix.rows * matrix.cols;
  const std::span<float> values(matrix.data, static_cast<size_t>(count));
  const double norm = global_norm(ctx, values);
  const float scale = static_cast<float>(1.0 / (norm + static_cast<double>(kNewtonSchulzEps)));
  ctx.parallel_for(count, kGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) values[static_cast<size_t>(i)] *= scale;
  });
  const bool tall = matrix.rows > matrix.cols;
  const int64_t side = std::min(matrix.rows, matrix.cols);
  Arena::Scope scope(ctx.scratch());
  const MatrixF gram(scope.alloc<float>(side * side), side, side);
  const MatrixF factor(scope.alloc<float>(side * side), side, side);
  MatrixF x = matrix, next(scope.alloc<float>(count), matrix.rows, matrix.cols);
  for (int step = 0; step < kNewtonSchulzSteps; ++step) {
    matmul(ctx, {.a = x, .b = x, .c = gram, .trans_a = tall, .trans_b = !tall});
    matmul(ctx, {.a = gram, .b = gram, .c = factor});
    // factor = a I + b gram + c gram^2
    ctx.parallel_for(side, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t j = 0; j < side; ++j) {
          float& value = factor.row(i)[j];
          value = kNewtonSchulzB * gram.row(i)[j] + kNewtonSchulzC * value;
          if (i == j) value += kNewtonSchulzA;
        }
      }
    });
    if (tall) {
      matmul(ctx, {.a = x, .b = factor, .c = next});
    } else {
      matmul(ctx, {.a = factor, .b = x, .c = next});
    }
    std::swap(x, next);
  }
  static_assert(kNewtonSchulzSteps % 2 == 1, "the result is in the other memory");
  std::memcpy(matrix.data, x.data, values.size_bytes());
}

float muon_shape_factor(int64_t rows, int64_t cols) {
  return static_cast<float>(std::sqrt(static_cast<double>(std::max(rows, cols))));
}

void muon_apply(Context& ctx, const MuonCoefficients& c, float shape_factor,
                std::span<float> weight, std::span<const float> orthogonal) {
  TWELL_CHECK(weight.size() == orthogonal.size(), "Muon: {} weights for {} updates", weight.size(),
              orthogonal.size());
  const float step = c.step_size * shape_factor;
  ctx.parallel_for(std::ssize(weight), kGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      float& w = weight[static_cast<size_t>(i)];
      w = std::fma(-step, orthogonal[static_cast<size_t>(i)], c.decay * w);
    }
  });
}

}  // namespace twell
