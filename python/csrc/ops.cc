// SPDX-License-Identifier: Apache-2.0
// The PyTorch ops of the feed-forward layer, torch.ops.twell.*, through PyTorch's stable ABI: their
// schemas, the handling of plans, and the kernels of the CPU. Shapes, dtypes and errors are
// documented beside the Python functions (python/twell/ops.py).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>
#include <string>

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

ConstMatrixF view(const Tensor& t) {
  return {static_cast<const float*>(t.const_data_ptr()), t.size(0), t.size(1)};
}
MatrixF output(const Tensor& t) {
  return {static_cast<float*>(t.mutable_data_ptr()), t.size(0), t.size(1)};
}

// The weights as the engine sees them, with the tensors that own the memory.
struct Weights {
  Tensor gate, up, down;
  FfnWeights views;

  Weights(const std::optional<Tensor>& w_gate, const Tensor& w_up, const Tensor& w_down,
          Activation activation)
      : gate(w_gate ? row_major(*w_gate) : w_up), up(row_major(w_up)), down(row_major(w_down)) {
    if (w_gate) views.w_gate = view(gate);
    views.w_up = view(up);
    views.w_down = view(down);
    views.activation = {.kind = activation};
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
  return torch::stable::new_zeros(like, {size.begin(), size.size()}, dtype);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> ffn_train_cpu(Tensor x_in, std::optional<Tensor> w_gate,
                                                         Tensor w_up, Tensor w_down,
                                                         std::string activation, int64_t handle,
                                                         int64_t execution, int64_t nnz,
                                                         int64_t /*union_neurons*/) {
  const LayerShape shape = check_layer(x_in, w_gate, w_up, w_down, activation, ScalarType::Float);
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const Tensor x = row_major(x_in);
  const Weights weights(w_gate, w_up, w_down, shape.activation);
  Tensor y = torch::stable::empty_like(x);
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
  const Weights weights(w_gate, w_up, w_down, shape.activation);
  Tensor d_x = torch::stable::empty_like(x);
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
  const Weights weights(w_gate, w_up, w_down, shape.activation);
  Tensor y = torch::stable::empty_like(x);
  const std::lock_guard lock(plan->runtime->mutex);
  plan->inference.policy = plan->policy;
  ffn_forward(plan->runtime->cpu, weights.views, view(x), output(y), plan->inference);
  return y;
}

void plan_set_policy(int64_t handle, std::string policy) {
  find_plan(handle)->policy = parse_ffn_policy(policy);
}

// report: float64 [kPlanFields] on the CPU. Fetches what was counted since the last update.
void plan_update(int64_t handle, Tensor report) {
  TWELL_CHECK(report.numel() == kPlanFields && report.scalar_type() == ScalarType::Double,
              "the report has {} values, expected {} of float64", report.numel(),
              static_cast<int>(kPlanFields));
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const std::lock_guard lock(plan->runtime->mutex);
  fetch_cuda_counts(*plan);
  const auto value = [](int64_t v) { return static_cast<double>(v); };
  const PlanReport values = {value(plan->train.tokens),
                             value(plan->train.nnz),
                             value(plan->train.union_neurons),
                             value(plan->train.max_row_nnz),
                             value(plan->train.recomputed),
                             plan->train.l1_sum,
                             value(plan->last.tokens),
                             value(plan->inference.tokens),
                             value(plan->inference.nnz),
                             value(plan->inference.max_row_nnz),
                             value(static_cast<int64_t>(plan->inference.execution))};
  std::copy(values.begin(), values.end(), static_cast<double*>(report.mutable_data_ptr()));
  plan->train = {};
  const FfnExecution execution = plan->inference.execution;
  plan->inference = {};
  plan->inference.execution = execution;
}

// active: uint8 [F] on the CPU, set to 1 for each neuron that fired in training since the last
// call; others become 0. Call plan_update first, which fetches the flags of the GPU.
void plan_active(int64_t handle, Tensor active) {
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const std::lock_guard lock(plan->runtime->mutex);
  auto* const out = static_cast<uint8_t*>(active.mutable_data_ptr());
  std::fill_n(out, active.numel(), uint8_t{0});
  TWELL_CHECK(plan->active.empty() || std::ssize(plan->active) == active.numel(),
              "flags of {} neurons for a layer of {}", active.numel(), plan->active.size());
  std::copy(plan->active.begin(), plan->active.end(), out);
  std::fill(plan->active.begin(), plan->active.end(), uint8_t{0});
}

int64_t plan_choose(int64_t handle, bool cuda, int64_t tokens, int64_t width, int64_t ffn,
                    bool gated, double nnz, double union_share) {
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const FfnTrainPolicy policy = plan->policy == FfnPolicy::kAuto    ? FfnTrainPolicy::kAuto
                                : plan->policy == FfnPolicy::kDense ? FfnTrainPolicy::kDense
                                                                    : FfnTrainPolicy::kHybrid;
  FfnTrainExecution execution = FfnTrainExecution::kDense;
  if (cuda) {
    execution = choose_train_cuda(*plan, {tokens, width, ffn, gated, Activation::kRelu}, policy,
                                  nnz, union_share);
  } else if (policy == FfnTrainPolicy::kAuto) {
    execution = choose_ffn_train_execution(tokens, width, ffn, nnz);
  } else if (policy == FfnTrainPolicy::kHybrid) {
    execution = FfnTrainExecution::kHybrid;
  }
  return static_cast<int64_t>(execution);
}

}  // namespace

LayerShape check_layer(const Tensor& x, const std::optional<Tensor>& w_gate, const Tensor& w_up,
                       const Tensor& w_down, const std::string& activation, ScalarType dtype) {
  TWELL_REQUIRE(activation == "relu" || activation == "relu2",
                "activation '{}': the sparse ops take relu and relu2", activation);
  TWELL_REQUIRE(x.dim() == 2 && w_up.dim() == 2 && w_down.dim() == 2,
                "x, w_up and w_down have {}, {} and {} dimensions, expected 2 of each", x.dim(),
                w_up.dim(), w_down.dim());
  const LayerShape shape{x.size(0), x.size(1), w_up.size(0), w_gate.has_value(),
                         activation == "relu2" ? Activation::kRelu2 : Activation::kRelu};
  const auto check = [&](const Tensor& w, const char* name) {
    TWELL_REQUIRE(w.dim() == 2 && w.size(0) == shape.ffn && w.size(1) == shape.width,
                  "{} is [{}, {}], expected [F, D] = [{}, {}], a neuron per row", name, w.size(0),
                  w.dim() == 2 ? w.size(1) : 0, shape.ffn, shape.width);
  };
  if (w_gate) check(*w_gate, "w_gate");
  check(w_up, "w_up");
  check(w_down, "w_down");
  const auto right = [&](const Tensor& t) {
    return t.scalar_type() == dtype && t.get_device_index() == x.get_device_index();
  };
  TWELL_REQUIRE(right(x) && right(w_up) && right(w_down) && (!w_gate || right(*w_gate)),
                "the feed-forward ops take float32 on the CPU and bfloat16 on a GPU, all operands "
                "on one device; convert them or use torch.autocast");
  return shape;
}

void check_gradients(const Tensor& d_y, const std::optional<Tensor>& d_l1, const Tensor& x) {
  TWELL_REQUIRE(d_y.dim() == 2 && d_y.size(0) == x.size(0) && d_y.size(1) == x.size(1) &&
                    d_y.scalar_type() == x.scalar_type() &&
                    d_y.get_device_index() == x.get_device_index(),
                "d_y differs from y in shape, dtype or device");
  TWELL_REQUIRE(!d_l1 || (d_l1->numel() == 1 && d_l1->scalar_type() == ScalarType::Float &&
                          d_l1->get_device_index() == x.get_device_index()),
                "d_l1 must be one float32 value on the device of x");
}

void check_saved(const Tensor& saved, const LayerShape& shape, bool cuda, int64_t execution,
                 int64_t nnz, int64_t union_neurons) {
  const int64_t expected = saved_bytes(shape, cuda, execution, nnz, union_neurons);
  TWELL_REQUIRE(saved.scalar_type() == ScalarType::Byte && saved.is_contiguous() &&
                    saved.numel() == expected && (saved.get_device_index() >= 0) == cuda,
                "`saved` must be the {} bytes that ffn_train returned for these operands",
                expected);
}

#ifndef TWELL_HAVE_CUDA
struct RuntimeCuda {};
struct PlanCuda {};
std::shared_ptr<RuntimeCuda> make_runtime_cuda() { return nullptr; }
std::shared_ptr<PlanCuda> make_plan_cuda() { return nullptr; }
void fetch_cuda_counts(Plan&) {}
FfnTrainExecution choose_train_cuda(const Plan&, const LayerShape&, FfnTrainPolicy, double,
                                    double) {
  return FfnTrainExecution::kDense;
}
int64_t saved_bytes_cuda(const LayerShape&, int64_t, int64_t, int64_t) {
  throw InputError("this build of twell has no CUDA ops");
}
#endif

int64_t saved_bytes(const LayerShape& shape, bool cuda, int64_t execution, int64_t nnz,
                    int64_t union_neurons) {
  if (shape.tokens == 0) return 0;
  if (cuda) return saved_bytes_cuda(shape, execution, nnz, union_neurons);
  return static_cast<int64_t>(kAlignment) + FfnSaved::bytes(shape.tokens, shape.ffn, shape.gated);
}

}  // namespace twell::python

// Bytes of `saved`, for fake kernels, which have no tensors to pass; -1 where there is no answer.
extern "C" __attribute__((visibility("default"))) int64_t twell_saved_bytes(
    int64_t tokens, int64_t width, int64_t ffn, int gated, int cuda, int64_t execution, int64_t nnz,
    int64_t union_neurons) noexcept {
  try {
    return twell::python::saved_bytes({tokens, width, ffn, gated != 0, twell::Activation::kRelu},
                                      cuda != 0, execution, nnz, union_neurons);
  } catch (const std::exception&) {
    return -1;  // an exception would end the process in the C code that calls this
  }
}

STABLE_TORCH_LIBRARY(twell, m) {
  m.def(
      "ffn_train(Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down, str activation, SymInt "
      "plan, "
      "SymInt execution, SymInt nnz, SymInt union_neurons) -> (Tensor y, Tensor l1, Tensor counts, "
      "Tensor "
      "saved)");
  m.def(
      "ffn_train_backward(Tensor d_y, Tensor? d_l1, Tensor x, Tensor? w_gate, Tensor w_up, Tensor "
      "w_down, Tensor saved, str activation, SymInt plan, SymInt execution, SymInt nnz, SymInt "
      "union_neurons) "
      "-> (Tensor d_x, Tensor d_w_gate, Tensor d_w_up, Tensor d_w_down)");
  m.def(
      "ffn(Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down, str activation, SymInt plan) -> "
      "Tensor y");
  m.def("plan_create(int sibling, int threads) -> int");
  m.def("plan_release(int plan) -> ()");
  m.def("plan_set_policy(int plan, str policy) -> ()");
  m.def("plan_update(int plan, Tensor(a!) report) -> ()");
  m.def("plan_active(int plan, Tensor(a!) active) -> ()");
  m.def(
      "plan_choose(int plan, bool cuda, int tokens, int width, int ffn, bool gated, float nnz, "
      "float union_share) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(twell, CPU, m) {
  m.impl("ffn_train", TORCH_BOX(&twell::python::ffn_train_cpu));
  m.impl("ffn_train_backward", TORCH_BOX(&twell::python::ffn_train_backward_cpu));
  m.impl("ffn", TORCH_BOX(&twell::python::ffn_cpu));
  m.impl("plan_update", TORCH_BOX(&twell::python::plan_update));
  m.impl("plan_active", TORCH_BOX(&twell::python::plan_active));
}

STABLE_TORCH_LIBRARY_IMPL(twell, CompositeExplicitAutograd, m) {
  m.impl("plan_create", TORCH_BOX(&twell::python::plan_create));
  m.impl("plan_release", TORCH_BOX(&twell::python::plan_release));
  m.impl("plan_set_policy", TORCH_BOX(&twell::python::plan_set_policy));
  m.impl("plan_choose", TORCH_BOX(&twell::python::plan_choose));
}
