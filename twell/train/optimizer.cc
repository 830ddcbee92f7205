// SPDX-License-Identifier: Apache-2.0
#include "twell/train/optimizer.h"

#include <algorithm>

#include "twell/ops/adamw/adamw.h"

namespace twell {

Optimizer::Optimizer(const Model& model, const ShardLayout& layout)
    : exp_avg_(layout.size()), exp_avg_sq_(layout.size()) {
  for (const ParamSpec& param : model.table) {
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
                     std::span<const float> grads, Model& model) {
  AdamW adamw;
  adamw.learning_rate = learning_rate_at(options, step - 1);
  adamw.beta1 = options.beta1;
  adamw.beta2 = options.beta2;
  adamw.eps = options.eps;
  adamw.step = step;
  if (options.clip_norm > 0 && grad_norm > options.clip_norm) {
    adamw.grad_scale = options.clip_norm / grad_norm;
  }
  for (const Run& run : runs_) {
    const auto part = [&run](auto span, int64_t offset) {
      return span.subspan(static_cast<size_t>(offset), static_cast<size_t>(run.size));
    };
    adamw.weight_decay = run.decay ? options.weight_decay : 0.0;
    adamw_step(ctx, adamw,
               {part(model.flat.span(), run.offset), part(grads, run.offset),
                part(exp_avg(), run.local), part(exp_avg_sq(), run.local),
                options.moment_dtype == DType::kBF16, options.seed, run.offset});
  }
}

}  // namespace twell
