// SPDX-License-Identifier: Apache-2.0
// Muon (Jordan et al. 2024) for matrices: momentum, whose matrix is brought near to the closest
// matrix with orthonormal rows or columns, and a step as large as AdamW's (Liu et al. 2025, "Muon
// is scalable for LLM training", section 2.2). As torch.optim.Muon with Nesterov's momentum and
// adjust_lr_fn "match_rms_adamw", which runs the iteration in bf16 where the CPU takes f32 here.
//
//   g = grad_scale * grad
//   m = momentum * m + (1 - momentum) * g                       (exp_avg)
//   u = momentum * m + (1 - momentum) * g
//   o = orthogonalise(u)
//   w = w - lr * weight_decay * w - lr * 0.2 sqrt(max(rows, cols)) * o
//
// The first two lines and the last are elementwise, so that ranks share them; the matrix between
// must be whole. All give the same bits for any thread count.
#pragma once

#include <cstdint>
#include <span>

#include "twell/base/context.h"
#include "twell/base/matrix.h"

namespace twell {

struct Muon {
  double learning_rate = 4e-3;
  double momentum = 0.95;
  double weight_decay = 0.1;
  double grad_scale = 1.0;  // applied to every gradient on the fly: the clipping factor
};
// The constants of one step, rounded to float once. For CPU and GPU kernels alike.
struct MuonCoefficients {
  float grad_scale;
  float momentum;
  float one_minus_momentum;
  float decay;      // 1 - lr * weight_decay
  float step_size;  // 0.2 lr; times sqrt(max(rows, cols)) of the matrix
};
MuonCoefficients muon_coefficients(const Muon& options);

// The iteration of orthogonalise, on X with ||X|| at most 1: five times
//   X <- a X + b (X X^T) X + c (X X^T)^2 X
// which takes singular values of 0.01 and more to between 0.68 and 1.13. Tall matrices take X^T X.
inline constexpr int kNewtonSchulzSteps = 5;
inline constexpr float kNewtonSchulzA = 3.4445f;
inline constexpr float kNewtonSchulzB = -4.775f;
inline constexpr float kNewtonSchulzC = 2.0315f;
inline constexpr float kNewtonSchulzEps = 1e-7f;  // added to the norm that X is divided by

// Takes gradients [n] to updates u, in place, and changes exp_avg [n].
void muon_momentum(Context& ctx, const MuonCoefficients& coefficients, std::span<float> grad,
                   std::span<float> exp_avg);

// In place. A matrix of zeros stays; NaN and infinity propagate to all of it.
void orthogonalise(Context& ctx, MatrixF matrix);

// What the step size is multiplied by for a matrix of this shape: sqrt(max(rows, cols)).
float muon_shape_factor(int64_t rows, int64_t cols);

// w [n] and o [n] are the same part of a matrix with this shape factor.
void muon_apply(Context& ctx, const MuonCoefficients& coefficients, float shape_factor,
                std::span<float> weight, std::span<const float> orthogonal);

}  // namespace twell
