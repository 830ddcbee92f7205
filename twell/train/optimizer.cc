// SPDX-License-Identifier: Apache-2.0
#include "twell/train/optimizer.h"

#include "twell/ops/adamw/adamw.h"

namespace twell {

Optimizer::Optimizer(const Model& model)
    : exp_avg_(model.flat.size()), exp_avg_sq_(model.flat.size()) {
  for (const ParamSpec& param : model.table) {
    if (runs_.empty() || runs_.back().decay == param.is_vector) {
      runs_.push_back({param.offset, 0, !param.is_vector});
    }
    runs_.back().size += param.size();
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
    const auto part = [&run](auto span) {
      return span.subspan(static_cast<size_t>(run.offset), static_cast<size_t>(run.size));
    };
    adamw.weight_decay = run.decay ? options.weight_decay : 0.0;
    adamw_step(ctx, adamw,
               {part(model.flat.span()), part(grads), part(exp_avg()), part(exp_avg_sq())});
  }
}

}  // namespace twell
