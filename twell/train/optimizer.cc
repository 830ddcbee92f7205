// SPDX-License-Identifier: Apache-2.0
#include "twell/train/optimizer.h"

#include <algorithm>

#include "twell/ops/adamw/adamw.h"
#include "twell/ops/muon/muon.h"

namespace twell {
namespace {

template <typename T>
std::span<T> part(std::span<T> flat, int64_t offset, int64_t size) {
  return flat.subspan(static_cast<size_t>(offset), static_cast<size_t>(size));
}

}  // namespace

Optimizer::Optimizer(const Model& model, const ShardLayout& layout, OptimizerKind kind,
                     Communicator* ranks)
    : layout_(layout), ranks_(ranks), exp_avg_(layout.size()), exp_avg_sq_(layout.size()) {
  const bool muon = kind == OptimizerKind::kMuon;
  if (muon) matrices_ = muon_matrices(model.table, layout);
  for (const ParamSpec& param : model.table) {
    if (muon && takes_muon(param)) continue;
    for (const ShardPiece& piece : layout.pieces()) {
      const int64_t begin = std::max(piece.begin, param.offset);
      const int64_t end = std::min(piece.begin + piece.size, param.offset + param.size());
      if (begin >= end) continue;
      const bool decay = !param.is_vector;
      const bool adjacent = !runs_.empty() && runs_.back().decay == decay &&
                            runs_.back().offset + runs_.back().size == begin;
      if (!adjacent) runs_.push_back({begin, piece.local + begin - piece.begin, 0, decay});
      runs_.back().size += end - begin;
    }
  }
}

void Optimizer::step(Context& ctx, const TrainOptions& options, int64_t step, double grad_norm,
                     std::span<float> grads, Model& model) {
  const bool clips = options.clip_norm > 0 && grad_norm > options.clip_norm;
  const double grad_scale = clips ? options.clip_norm / grad_norm : 1.0;
  adamw(ctx, options, step, grad_scale, grads, model);
  if (!matrices_.empty()) muon(ctx, options, step, grad_scale, grads, model);
}

void Optimizer::adamw(Context& ctx, const TrainOptions& options, int64_t step, double grad_scale,
                      std::span<const float> grads, Model& model) {
  AdamW adamw;
  adamw.learning_rate = learning_rate_at(options, step - 1);
  adamw.beta1 = options.beta1;
  adamw.beta2 = options.beta2;
  adamw.eps = options.eps;
  adamw.step = step;
  adamw.grad_scale = grad_scale;
  for (const Run& run : runs_) {
    adamw.weight_decay = run.decay ? options.weight_decay : 0.0;
    adamw_step(ctx, adamw,
               {part(model.flat.span(), run.offset, run.size), part(grads, run.offset, run.size),
                part(exp_avg(), run.local, run.size), part(exp_avg_sq(), run.local, run.size),
                options.moment_dtype == DType::kBF16, options.seed, run.offset});
  }
}

void Optimizer::muon(Context& ctx, const TrainOptions& options, int64_t step, double grad_scale,
                     std::span<float> grads, Model& model) {
  const MuonCoefficients coefficients =
      muon_coefficients({.learning_rate = matrix_learning_rate_at(options, step - 1),
                         .momentum = options.momentum,
                         .weight_decay = options.weight_decay,
                         .grad_scale = grad_scale});
  for (const MuonMatrix& matrix : matrices_) {
    for (const ShardPiece& piece : matrix.pieces) {
      muon_momentum(ctx, coefficients, part(grads, piece.begin, piece.size),
                    part(exp_avg(), piece.local, piece.size));
    }
  }
  const auto in_buckets = [&](const auto& exchange) {
    if (ranks_ == nullptr) return;
    for (const GradientBucket& bucket : layout_.buckets()) {
      exchange(part(grads, bucket.begin, bucket.end - bucket.begin));
    }
  };
  in_buckets([this](std::span<float> bucket) { ranks_->all_gather(bucket); });
  for (const MuonMatrix& matrix : matrices_) {
    const std::span<float> update = part(grads, matrix.offset, matrix.size());
    if (matrix.owned) {
      orthogonalise(ctx, {update.data(), matrix.rows, matrix.cols});
    } else {
      std::fill(update.begin(), update.end(), 0.0f);
    }
  }
  in_buckets([this](std::span<float> bucket) { ranks_->reduce_scatter_sum(bucket); });
  for (const MuonMatrix& matrix : matrices_) {
    const float factor = muon_shape_factor(matrix.rows, matrix.cols);
    for (const ShardPiece& piece : matrix.pieces) {
      muon_apply(ctx, coefficients, factor, part(model.flat.span(), piece.begin, piece.size),
                 part(grads, piece.begin, piece.size));
    }
  }
}

}  // namespace twell
