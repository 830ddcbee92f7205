// SPDX-License-Identifier: Apache-2.0
#include "twell/train/optimizer_cuda.h"

#include <algorithm>
#include <vector>

#include "twell/model/model_cuda.h"
#include "twell/train/activity.h"
#include "twell/train/device_update.h"

namespace twell {
namespace {

int64_t moment_bytes(DType dtype) { return dtype == DType::kBF16 ? 2 : 4; }

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
      rest_(size_),
      grads_(size_),
      exp_avg_(size_ * moment_bytes(options.moment_dtype)),
      exp_avg_sq_(exp_avg_.size()),
      norm_partials_(gradient_norm_partials(size_)) {
  const std::vector<AdamWRun> runs = adamw_runs(model);
  run_count_ = std::ssize(runs);
  runs_ = DeviceBuffer<AdamWRun>(run_count_);
  const auto stream = ctx_.stream();
  TWELL_CUDA_CHECK(cudaMemcpyAsync(runs_.data(), runs.data(), static_cast<size_t>(runs_.bytes()),
                                   cudaMemcpyHostToDevice, stream));
  for (const DeviceBuffer<std::byte>* moments : {&exp_avg_, &exp_avg_sq_}) {
    TWELL_CUDA_CHECK(
        cudaMemsetAsync(moments->data(), 0, static_cast<size_t>(moments->bytes()), stream));
  }
  upload({.exp_avg = {}, .exp_avg_sq = {}, .weights = model.flat.span()});
}

int64_t OptimizerCuda::bytes_needed(int64_t parameters, DType moments) {
  constexpr int64_t kWeight = sizeof(__nv_bfloat16) + sizeof(int16_t), kGradient = sizeof(float);
  return parameters * (kWeight + kGradient + 2 * moment_bytes(moments)) +
         gradient_norm_partials(parameters) * static_cast<int64_t>(sizeof(double));
}

void OptimizerCuda::step(const AdamWCoefficients* coefficients, GradientNorm* norm) {
  TWELL_CUDA_CHECK(launch_gradient_norm({.size = size_,
                                         .grad = grads_.data(),
                                         .clip_norm = options_.clip_norm,
                                         .partial = norm_partials_.data(),
                                         .result = norm},
                                        ctx_.stream()));
  TWELL_CUDA_CHECK(launch_adamw(
      {.size = size_,
       .runs = runs_.data(),
       .run_count = run_count_,
       .coefficients = coefficients,
       .clip_factor = &norm->clip_factor,
       .grad = grads_.data(),
       .weight = weights_.data(),
       .weight_rest = rest_.data(),
       .moments = options_.moment_dtype == DType::kBF16 ? MomentDType::kBF16 : MomentDType::kF32,
       .exp_avg = exp_avg_.data(),
       .exp_avg_sq = exp_avg_sq_.data()},
      ctx_.stream()));
}

void OptimizerCuda::reinit_dead(int64_t step, const uint8_t* active, const GradientNorm* norm) {
  const auto weights =
      model_matrices<const BF16>(config_, reinterpret_cast<const BF16*>(weights_.data()));
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    const Matrix<const BF16> firing = weights.layers[static_cast<size_t>(layer)].ffn.firing();
    const int64_t at = device_bf16(firing.data) - weights_.data();
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
                            .weight = weights_.data() + at,
                            .weight_rest = rest_.data() + at},
                           ctx_.stream()));
  }
}

void OptimizerCuda::download(const OptimizerTensors& to) const {
  const auto copy = [&](const auto& from, auto values) {
    TWELL_CUDA_CHECK(cudaMemcpyAsync(values.data(), from.data(), values.size_bytes(),
                                     cudaMemcpyDeviceToHost, ctx_.stream()));
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
  };
  const auto moments = [&](const DeviceBuffer<std::byte>& from, std::span<float> values) {
    if (options_.moment_dtype != DType::kBF16) return copy(from, values);
    std::vector<BF16> rounded(values.size());
    copy(from, std::span(rounded));
    std::transform(rounded.begin(), rounded.end(), values.begin(),
                   [](BF16 v) { return to_float(v); });
  };
  check_sizes(to);
  if (!to.weights.empty()) {
    TWELL_CUDA_CHECK(
        launch_join_weights(weights_.data(), rest_.data(), size_, grads_.data(), ctx_.stream()));
    copy(grads_, to.weights);
  }
  if (!to.exp_avg.empty()) moments(exp_avg_, to.exp_avg);
  if (!to.exp_avg_sq.empty()) moments(exp_avg_sq_, to.exp_avg_sq);
}

void OptimizerCuda::upload(const OptimizerTensors& from) {
  const auto copy = [&](auto values, const auto& to) {
    TWELL_CUDA_CHECK(cudaMemcpyAsync(to.data(), values.data(), values.size_bytes(),
                                     cudaMemcpyHostToDevice, ctx_.stream()));
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
  };
  const auto moments = [&](std::span<const float> values, const DeviceBuffer<std::byte>& to) {
    if (options_.moment_dtype != DType::kBF16) return copy(values, to);
    std::vector<BF16> rounded(values.size());
    std::transform(values.begin(), values.end(), rounded.begin(),
                   [](float v) { return to_bf16(v); });
    copy(std::span<const BF16>(rounded), to);
  };
  check_sizes(from);
  if (!from.weights.empty()) {
    copy(std::span<const float>(from.weights), grads_);
    TWELL_CUDA_CHECK(
        launch_split_weights(grads_.data(), size_, weights_.data(), rest_.data(), ctx_.stream()));
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
  }
  if (!from.exp_avg.empty()) moments(from.exp_avg, exp_avg_);
  if (!from.exp_avg_sq.empty()) moments(from.exp_avg_sq, exp_avg_sq_);
}

void OptimizerCuda::check_sizes(const OptimizerTensors& tensors) const {
  for (const auto values : {tensors.weights, tensors.exp_avg, tensors.exp_avg_sq}) {
    TWELL_CHECK(values.empty() || std::ssize(values) == size_, "{} values of {}", values.size(),
                size_);
  }
}

}  // namespace twell
