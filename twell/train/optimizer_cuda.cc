// SPDX-License-Identifier: Apache-2.0
#include "twell/train/optimizer_cuda.h"

#include <vector>

#include "twell/train/activity.h"
#include "twell/train/device_update.h"

namespace twell {
namespace {

std::vector<AdamWRun> adamw_runs(const Model& model) {
  std::vector<AdamWRun> runs;
  for (const ParamSpec& param : model.table) {
    const bool decay = !param.is_vector;
    if (runs.empty() || runs.back().decay != decay) runs.push_back({param.offset, decay});
  }
  return runs;
}

}  // namespace

OptimizerCuda::OptimizerCuda(CudaContext& ctx, const Model& model, const TrainOptions& options)
    : ctx_(ctx),
      options_(options),
      config_(model.config),
      size_(model.flat.size()),
      weights_(size_),
      grads_(size_),
      exp_avg_(size_),
      exp_avg_sq_(size_),
      bf16_(size_),
      norm_partials_(gradient_norm_partials(size_)) {
  const std::vector<AdamWRun> runs = adamw_runs(model);
  run_count_ = std::ssize(runs);
  runs_ = DeviceBuffer<AdamWRun>(run_count_);
  const auto stream = ctx_.stream();
  TWELL_CUDA_CHECK(cudaMemcpyAsync(runs_.data(), runs.data(), static_cast<size_t>(runs_.bytes()),
                                   cudaMemcpyHostToDevice, stream));
  for (const DeviceBuffer<float>* moments : {&exp_avg_, &exp_avg_sq_}) {
    TWELL_CUDA_CHECK(
        cudaMemsetAsync(moments->data(), 0, static_cast<size_t>(moments->bytes()), stream));
  }
  upload({.exp_avg = {}, .exp_avg_sq = {}, .weights = model.flat.span()});
}

int64_t OptimizerCuda::bytes_needed(int64_t parameters) {
  return parameters * static_cast<int64_t>(4 * sizeof(float) + sizeof(__nv_bfloat16)) +
         gradient_norm_partials(parameters) * static_cast<int64_t>(sizeof(double));
}

void OptimizerCuda::clear_gradients() {
  TWELL_CUDA_CHECK(
      cudaMemsetAsync(grads_.data(), 0, static_cast<size_t>(grads_.bytes()), ctx_.stream()));
}

void OptimizerCuda::step(const AdamWCoefficients* coefficients, GradientNorm* norm) {
  TWELL_CUDA_CHECK(launch_gradient_norm({.size = size_,
                                         .grad = grads_.data(),
                                         .clip_norm = options_.clip_norm,
                                         .partial = norm_partials_.data(),
                                         .result = norm},
                                        ctx_.stream()));
  TWELL_CUDA_CHECK(launch_adamw({.size = size_,
                                 .runs = runs_.data(),
                                 .run_count = run_count_,
                                 .coefficients = coefficients,
                                 .clip_factor = &norm->clip_factor,
                                 .grad = grads_.data(),
                                 .weight = weights_.data(),
                                 .weight_bf16 = bf16_.data(),
                                 .exp_avg = exp_avg_.data(),
                                 .exp_avg_sq = exp_avg_sq_.data()},
                                ctx_.stream()));
}

void OptimizerCuda::reinit_dead(int64_t step, const uint8_t* active, const GradientNorm* norm) {
  const ModelMatrices<float> weights = model_matrices<float>(config_, weights_.data());
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    const MatrixF firing = weights.layers[static_cast<size_t>(layer)].ffn.firing();
    TWELL_CUDA_CHECK(
        launch_reinit_dead({.neurons = firing.rows,
                            .width = firing.cols,
                            .active = active + layer * config_.ffn,
                            .skip_unless_finite = &norm->clip_factor,
                            .strength = static_cast<float>(options_.reinit_strength),
                            .std_dev = static_cast<float>(options_.reinit_std),
                            .seed = options_.seed,
                            .stream = kReinitStream + static_cast<uint64_t>(layer),
                            .first_index = static_cast<uint64_t>(step * firing.rows * firing.cols),
                            .weight = firing.data,
                            .weight_bf16 = bf16_.data() + (firing.data - weights_.data())},
                           ctx_.stream()));
  }
}

void OptimizerCuda::download(const OptimizerTensors& to) const {
  const auto copy = [&](const DeviceBuffer<float>& from, std::span<float> values) {
    if (values.empty()) return;
    TWELL_CHECK(std::ssize(values) == size_, "{} values of {}", values.size(), size_);
    TWELL_CUDA_CHECK(cudaMemcpyAsync(values.data(), from.data(), values.size_bytes(),
                                     cudaMemcpyDeviceToHost, ctx_.stream()));
  };
  copy(weights_, to.weights);
  copy(exp_avg_, to.exp_avg);
  copy(exp_avg_sq_, to.exp_avg_sq);
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
}

void OptimizerCuda::upload(const OptimizerTensors& from) {
  const auto copy = [&](std::span<const float> values, const DeviceBuffer<float>& to) {
    if (values.empty()) return;
    TWELL_CHECK(std::ssize(values) == size_, "{} values of {}", values.size(), size_);
    TWELL_CUDA_CHECK(cudaMemcpyAsync(to.data(), values.data(), values.size_bytes(),
                                     cudaMemcpyHostToDevice, ctx_.stream()));
  };
  copy(from.weights, weights_);
  copy(from.exp_avg, exp_avg_);
  copy(from.exp_avg_sq, exp_avg_sq_);
  TWELL_CUDA_CHECK(launch_round_weights(weights_.data(), size_, bf16_.data(), ctx_.stream()));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
}

}  // namespace twell
