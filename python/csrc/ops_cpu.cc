// SPDX-License-Identifier: Apache-2.0
// The CPU kernels of torch.ops.twell.*.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>

#include "python/csrc/ops.h"
#include "python/csrc/plan.h"
#include "twell/base/error.h"

namespace twell::python {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// What the first kAlignment bytes of `saved` hold on the CPU.
struct SavedHeader {
  int64_t execution;
  int64_t tokens;
  int64_t tail_rows;
};
static_assert(sizeof(SavedHeader) <= kAlignment);

Tensor row_major(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// Row-major; leading dimensions are one.
ConstMatrixF view(const Tensor& t) {
  const int64_t width = t.size(t.dim() - 1);
  return {static_cast<const float*>(t.const_data_ptr()), width > 0 ? t.numel() / width : 0, width};
}
MatrixF output(const Tensor& t) {
  const ConstMatrixF m = view(t);
  return {static_cast<float*>(t.mutable_data_ptr()), m.rows, m.cols};
}

// The weights as the engine sees them, with the tensors that own the memory.
struct Weights {
  Tensor gate, up, down;
  FfnWeights views;

  Weights(const std::optional<Tensor>& w_gate, const Tensor& w_up, const Tensor& w_down,
          const LayerShape& shape)
      : gate(w_gate ? row_major(*w_gate) : w_up), up(row_major(w_up)), down(row_major(w_down)) {
    if (w_gate) views.w_gate = view(gate);
    views.w_up = view(up);
    views.w_down = view(down);
    views.activation = {.kind = shape.activation, .threshold = shape.threshold};
  }
};

FfnSaved saved_view(const Tensor& saved, const LayerShape& shape) {
  check_saved(saved, shape, false, 0, 0, 0);
  auto* const bytes = static_cast<std::byte*>(saved.mutable_data_ptr());
  TWELL_CHECK(reinterpret_cast<uintptr_t>(bytes) % kAlignment == 0,
              "saved activations are not aligned to {} bytes", kAlignment);
  return {shape.tokens, shape.ffn, shape.gated, reinterpret_cast<float*>(bytes + kAlignment)};
}

Tensor zeros(const Tensor& like, std::initializer_list<int64_t> size, ScalarType dtype) {
  int64_t values = 1;
  for (const int64_t n : size) values *= n;
  constexpr int64_t kManyValues = 32768;  // PyTorch clears more on all threads
  if (values > kManyValues) {
    return torch::stable::new_zeros(like, {size.begin(), size.size()}, dtype);
  }
  Tensor t = made(like, {size.begin(), size.size()}, dtype);
  std::memset(t.mutable_data_ptr(), 0, static_cast<size_t>(values) * t.element_size());
  return t;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> ffn_train_cpu(Tensor x_in, std::optional<Tensor> w_gate,
                                                         Tensor w_up, Tensor w_down,
                                                         std::string activation, int64_t handle,
                                                         int64_t execution, int64_t nnz,
                                                         int64_t /*union_neurons*/) {
  const LayerShape shape = check_layer(x_in, w_gate, w_up, w_down, activation, ScalarType::Float);
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const Tensor x = row_major(x_in);
  const Weights weights(w_gate, w_up, w_down, shape);
  Tensor y = made_like(x);
  Tensor l1 = zeros(x, {}, ScalarType::Float);
  Tensor counts = zeros(x, {kCounts}, ScalarType::Long);
  // Zeros, because gaps between arrays count when results are compared.
  Tensor saved = zeros(x, {saved_bytes(shape, false, 0, 0, 0)}, ScalarType::Byte);
  if (shape.tokens == 0) return {y, l1, counts, saved};

  const std::lock_guard lock(plan->runtime->mutex);
  plan->last = shape;
  plan->active.resize(static_cast<size_t>(shape.ffn));
  FfnSaved kept = saved_view(saved, shape);
  const FfnTrainStats stats = ffn_train_forward(
      plan->runtime->cpu,
      {.weights = weights.views,
       .x = view(x),
       .y = output(y),
       .policy = execution == 0 ? FfnTrainPolicy::kDense : FfnTrainPolicy::kHybrid,
       .nnz_hint = static_cast<double>(nnz),
       .active = plan->active},
      kept);
  const SavedHeader header{static_cast<int64_t>(kept.execution), kept.tokens,
                           kept.hybrid.tail_rows};
  std::memcpy(saved.mutable_data_ptr(), &header, sizeof header);
  *static_cast<float*>(l1.mutable_data_ptr()) = static_cast<float>(stats.l1_sum);
  auto* const out = static_cast<int64_t*>(counts.mutable_data_ptr());
  out[0] = stats.tokens;
  out[1] = stats.nnz;
  out[3] = stats.max_row_nnz;
  plan->train.tokens += stats.tokens;
  plan->train.nnz += stats.nnz;
  plan->train.max_row_nnz = std::max(plan->train.max_row_nnz, stats.max_row_nnz);
  plan->train.l1_sum += stats.l1_sum;
  return {y, l1, counts, saved};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> ffn_train_backward_cpu(
    Tensor d_y_in, std::optional<Tensor> d_l1, Tensor x_in, std::optional<Tensor> w_gate,
    Tensor w_up, Tensor w_down, Tensor saved, std::string activation, int64_t handle,
    int64_t /*execution*/, int64_t /*nnz*/, int64_t /*union_neurons*/) {
  const LayerShape shape = check_layer(x_in, w_gate, w_up, w_down, activation, ScalarType::Float);
  check_gradients(d_y_in, d_l1, x_in);
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const Tensor x = row_major(x_in);
  const Tensor d_y = row_major(d_y_in);
  const Weights weights(w_gate, w_up, w_down, shape);
  Tensor d_x = made_like(x);
  Tensor d_w_gate = w_gate ? zeros(x, {shape.ffn, shape.width}, ScalarType::Float)
                           : zeros(x, {0}, ScalarType::Float);
  Tensor d_w_up = zeros(x, {shape.ffn, shape.width}, ScalarType::Float);
  Tensor d_w_down = zeros(x, {shape.ffn, shape.width}, ScalarType::Float);
  if (shape.tokens == 0) return {d_x, d_w_gate, d_w_up, d_w_down};

  FfnSaved kept = saved_view(saved, shape);
  SavedHeader header;
  std::memcpy(&header, saved.const_data_ptr(), sizeof header);
  TWELL_REQUIRE((header.execution == static_cast<int64_t>(FfnTrainExecution::kDense) ||
                 header.execution == static_cast<int64_t>(FfnTrainExecution::kHybrid)) &&
                    header.tokens == shape.tokens && header.tail_rows >= 0 &&
                    header.tail_rows <= shape.tokens,
                "`saved` is not what ffn_train returned for these operands");
  kept.execution = static_cast<FfnTrainExecution>(header.execution);
  kept.tokens = header.tokens;
  if (kept.execution == FfnTrainExecution::kHybrid) {
    TWELL_CHECK(kept.plan_hybrid(shape.tokens), "no hybrid layout for {} tokens", shape.tokens);
    kept.hybrid.tail_rows = header.tail_rows;
  }
  FfnGrads grads;
  if (w_gate) grads.w_gate = output(d_w_gate);
  grads.w_up = output(d_w_up);
  grads.w_down = output(d_w_down);
  const std::lock_guard lock(plan->runtime->mutex);
  ffn_train_backward(plan->runtime->cpu,
                     {.weights = weights.views,
                      .x = view(x),
                      .d_y = view(d_y),
                      .l1_scale = d_l1 ? *static_cast<const float*>(d_l1->const_data_ptr()) : 0.0f,
                      .d_x = output(d_x),
                      .grads = grads},
                     kept);
  return {d_x, d_w_gate, d_w_up, d_w_down};
}

Tensor ffn_cpu(Tensor x_in, std::optional<Tensor> w_gate, Tensor w_up, Tensor w_down,
               std::string activation, int64_t handle) {
  const LayerShape shape = check_layer(x_in, w_gate, w_up, w_down, activation, ScalarType::Float);
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const Tensor x = row_major(x_in);
  const Weights weights(w_gate, w_up, w_down, shape);
  Tensor y = made_like(x);
  const std::lock_guard lock(plan->runtime->mutex);
  plan->inference.policy = plan->policy;
  ffn_forward(plan->runtime->cpu, weights.views, view(x), output(y), plan->inference);
  return y;
}

}  // namespace

FfnTrainExecution choose_train_cpu(int64_t tokens, int64_t width, int64_t ffn, double nnz) {
  return choose_ffn_train_execution(tokens, width, ffn, nnz);
}

int64_t saved_bytes_cpu(const LayerShape& shape) {
  return static_cast<int64_t>(kAlignment) + FfnSaved::bytes(shape.tokens, shape.ffn, shape.gated);
}

}  // namespace twell::python

TWELL_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, m) {
  m.impl("ffn_train", TORCH_BOX(&twell::python::ffn_train_cpu));
  m.impl("ffn_train_backward", TORCH_BOX(&twell::python::ffn_train_backward_cpu));
  m.impl("ffn", TORCH_BOX(&twell::python::ffn_cpu));
}
