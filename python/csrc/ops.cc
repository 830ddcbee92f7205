// SPDX-License-Identifier: Apache-2.0
// The PyTorch ops of the feed-forward layer, torch.ops.twell.*, through PyTorch's stable ABI: their
// schemas, checks, and the handling of plans. Shapes, dtypes and errors are documented beside the
// Python functions (python/twell/ops.py).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "python/csrc/ops.h"
#include "python/csrc/plan.h"
#include "twell/base/error.h"

namespace twell::python {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

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
  const PlanReport values = {value(plan->train.tokens),        value(plan->train.nnz),
                             value(plan->train.union_neurons), value(plan->train.max_row_nnz),
                             value(plan->train.recomputed),    plan->train.l1_sum,
                             value(plan->last.tokens),         value(plan->inference.tokens),
                             value(plan->inference.nnz),       value(plan->inference.max_row_nnz)};
  std::copy(values.begin(), values.end(), static_cast<double*>(report.mutable_data_ptr()));
  plan->train = {};
  const FfnExecution execution = plan->inference.execution;
  plan->inference = {};
  plan->inference.execution = execution;
}

// name: uint8 on the CPU. The execution of the last inference call before the last update, as bytes
// followed by zeros.
void plan_execution(int64_t handle, Tensor name) {
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const std::lock_guard lock(plan->runtime->mutex);
  const std::string_view execution = plan->inference.execution.name;
  TWELL_CHECK(name.numel() >= std::ssize(execution), "{} bytes for the name {}", name.numel(),
              execution);
  auto* const out = static_cast<uint8_t*>(name.mutable_data_ptr());
  std::fill_n(out, name.numel(), uint8_t{0});
  std::copy(execution.begin(), execution.end(), out);
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
  const FfnTrainPolicy policy = chooses(plan->policy)               ? FfnTrainPolicy::kAuto
                                : plan->policy == FfnPolicy::kDense ? FfnTrainPolicy::kDense
                                                                    : FfnTrainPolicy::kHybrid;
  FfnTrainExecution execution = FfnTrainExecution::kDense;
  if (cuda) {
    execution = choose_train_cuda(*plan, {tokens, width, ffn, gated, Activation::kRelu}, policy,
                                  nnz, union_share);
  } else if (policy == FfnTrainPolicy::kAuto) {
    execution = choose_train_cpu(tokens, width, ffn, nnz);
  } else if (policy == FfnTrainPolicy::kHybrid) {
    execution = FfnTrainExecution::kHybrid;
  }
  return static_cast<int64_t>(execution);
}

}  // namespace

namespace {

// "relu", "relu2", "drelu", or "fatrelu:" and its threshold.
std::pair<Activation, float> parse_op_activation(const std::string& text) {
  const std::string name = text.substr(0, text.find(':'));
  const bool fatrelu = name == "fatrelu" && name.size() < text.size();
  TWELL_REQUIRE(fatrelu || text == "relu" || text == "relu2" || text == "drelu",
                "activation '{}': the sparse ops take relu, relu2, drelu and fatrelu:THRESHOLD",
                text);
  if (!fatrelu) return {parse_activation(name, "activation"), 0.0f};
  const std::string number = text.substr(name.size() + 1);
  char* end = nullptr;
  const float threshold = std::strtof(number.c_str(), &end);
  TWELL_REQUIRE(!number.empty() && *end == '\0' && threshold >= 0.0f && threshold <= 1e6f,
                "activation '{}': the threshold must be a number from 0 to 1e6", text);
  return {Activation::kFatRelu, threshold};
}

}  // namespace

LayerShape check_layer(const Tensor& x, const std::optional<Tensor>& w_gate, const Tensor& w_up,
                       const Tensor& w_down, const std::string& activation, ScalarType dtype) {
  const auto [kind, threshold] = parse_op_activation(activation);
  TWELL_REQUIRE(kind != Activation::kDRelu || w_gate.has_value(), "drelu needs w_gate");
  TWELL_REQUIRE(x.dim() >= 1 && w_up.dim() == 2 && w_down.dim() == 2,
                "x, w_up and w_down have {}, {} and {} dimensions, expected [..., D], [F, D] and "
                "[F, D]",
                x.dim(), w_up.dim(), w_down.dim());
  const int64_t width = x.size(x.dim() - 1);
  const LayerShape shape{
      width > 0 ? x.numel() / width : 0, width, w_up.size(0), w_gate.has_value(), kind, threshold};
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

Tensor made(const Tensor& like, std::span<const int64_t> sizes, ScalarType dtype) {
  constexpr size_t kMostDims = 64;
  TWELL_REQUIRE(sizes.size() <= kMostDims, "a tensor of {} dimensions, at most {} are supported",
                sizes.size(), kMostDims);
  int64_t strides[kMostDims];
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<int64_t>(sizes[i], 1);
  }
  int32_t device_type = 0, device = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(std::ssize(sizes), sizes.data(), strides,
                                                  static_cast<int32_t>(dtype), device_type, device,
                                                  &handle));
  return Tensor(handle);
}

Tensor made_like(const Tensor& t) {
  const auto sizes = t.sizes();
  return made(t, {sizes.data(), sizes.size()}, t.scalar_type());
}

void check_gradients(const Tensor& d_y, const std::optional<Tensor>& d_l1, const Tensor& x) {
  TWELL_REQUIRE(std::ranges::equal(d_y.sizes(), x.sizes()) &&
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

#ifdef TWELL_NO_CPU_OPS  // a kernel of the Hub for GPUs alone
FfnTrainExecution choose_train_cpu(int64_t, int64_t, int64_t, double) {
  return FfnTrainExecution::kDense;
}
int64_t saved_bytes_cpu(const LayerShape&) {
  throw InputError("this build of twell has no CPU ops");
}
#endif

int64_t saved_bytes(const LayerShape& shape, bool cuda, int64_t execution, int64_t nnz,
                    int64_t union_neurons) {
  if (shape.tokens == 0) return 0;
  if (cuda) return saved_bytes_cuda(shape, execution, nnz, union_neurons);
  return saved_bytes_cpu(shape);
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

TWELL_TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
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
  m.def("plan_execution(int plan, Tensor(a!) name) -> ()");
  m.def("plan_active(int plan, Tensor(a!) active) -> ()");
  m.def(
      "plan_choose(int plan, bool cuda, int tokens, int width, int ffn, bool gated, float nnz, "
      "float union_share) -> int");
}

TWELL_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, m) {
  m.impl("plan_update", TORCH_BOX(&twell::python::plan_update));
  m.impl("plan_execution", TORCH_BOX(&twell::python::plan_execution));
  m.impl("plan_active", TORCH_BOX(&twell::python::plan_active));
}

TWELL_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, m) {
  m.impl("plan_create", TORCH_BOX(&twell::python::plan_create));
  m.impl("plan_release", TORCH_BOX(&twell::python::plan_release));
  m.impl("plan_set_policy", TORCH_BOX(&twell::python::plan_set_policy));
  m.impl("plan_choose", TORCH_BOX(&twell::python::plan_choose));
}
