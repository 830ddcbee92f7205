// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels of torch.ops.twell.*: PyTorch's current device and stream, PyTorch's allocator
// for results, saved activations and the workspace of a training call. The workspaces of inference
// and of libraries belong to the runtime of the plan, one per stream and shape of layer. Nothing
// synchronises but fetch_cuda_counts. Calls can be captured: each capture has workspaces and counts
// of its own, because graphs may be replayed at once, and they are freed when the graph is gone and
// the next call comes, or the plans are released.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "python/csrc/ops.h"
#include "python/csrc/plan.h"
#include "python/csrc/totals.h"
#include "twell/base/cuda.h"
#include "twell/ops/ffn/ffn_cuda.h"
#include "twell/ops/ffn_train/ffn_train_cuda.h"

namespace twell::python {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Allows this thread to allocate and free device memory while a stream of the process is being
// captured, which would end the capture otherwise. The library's allocations are for memory that
// lives on, not for nodes of the graph.
class AllowAllocation {
 public:
  AllowAllocation() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~AllowAllocation() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  AllowAllocation(const AllowAllocation&) = delete;
  AllowAllocation& operator=(const AllowAllocation&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Makes an object whose construction enqueues work and waits for it, on a stream of its own: the
// caller's stream may be captured, and then can do neither.
template <typename Make>
auto made_apart(const Make& make) {
  const CudaStream stream;
  CudaContext ctx(stream.get());
  auto made = make(ctx);
  stream.synchronize();
  return made;
}

template <typename T>
DeviceBuffer<T> zeroed(int64_t n) {
  return made_apart([n](CudaContext& ctx) {
    DeviceBuffer<T> buffer(n);
    TWELL_CUDA_CHECK(
        cudaMemsetAsync(buffer.data(), 0, static_cast<size_t>(buffer.bytes()), ctx.stream()));
    return buffer;
  });
}

using LayerKey = std::tuple<int64_t, int64_t, bool>;  // D, F, gated

// Where calls are enqueued: a device and a stream, and the capture that the stream is in, or 0.
using Where = std::tuple<int, cudaStream_t, unsigned long long>;

// The capture that a stream is in.
struct Capture {
  explicit Capture(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    cudaGraph_t of_stream = nullptr;
#if CUDART_VERSION >= 13000
    TWELL_CUDA_CHECK(
        cudaStreamGetCaptureInfo(stream, &status, &id, &of_stream, nullptr, nullptr, nullptr));
#else
    TWELL_CUDA_CHECK(
        cudaStreamGetCaptureInfo_v2(stream, &status, &id, &of_stream, nullptr, nullptr));
#endif
    if (status == cudaStreamCaptureStatusNone) return;
    number = id;
    graph = of_stream;
  }
  unsigned long long number = 0;  // 0: none
  cudaGraph_t graph = nullptr;
};

// Whether a graph and all that was instantiated from it are gone.
class GraphEnd {
 public:
  // Null: there is no graph.
  explicit GraphEnd(cudaGraph_t graph) {
    if (graph == nullptr) return;
    gone_ = std::make_shared<std::atomic<bool>>(false);
    auto of_graph = std::make_unique<Gone>(gone_);
    cudaUserObject_t object = nullptr;
    // CUDA calls this from a thread that may not call CUDA, so it only leaves a note.
    const cudaHostFn_t note = [](void* gone) {
      const std::unique_ptr<Gone> owned(static_cast<Gone*>(gone));
      (*owned)->store(true);
    };
    TWELL_CUDA_CHECK(
        cudaUserObjectCreate(&object, of_graph.get(), note, 1, cudaUserObjectNoDestructorSync));
    of_graph.release();
    TWELL_CUDA_CHECK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
  }
  bool came() const { return gone_ != nullptr && gone_->load(); }

 private:
  using Gone = std::shared_ptr<std::atomic<bool>>;
  Gone gone_;
};

}  // namespace

struct RuntimeCuda {
  struct OnStream {
    OnStream(cudaStream_t stream, const Capture& capture) : ctx(stream), graph(capture.graph) {}
    CudaContext ctx;
    GraphEnd graph;
    std::map<LayerKey, std::unique_ptr<FfnWorkspaceCuda>> workspaces;
    // That were too small for a later call of the same capture.
    std::vector<std::unique_ptr<FfnWorkspaceCuda>> outgrown;
  };
  std::map<Where, std::shared_ptr<OnStream>> streams;
  ~RuntimeCuda() {
    if (streams.empty()) return;
    const AllowAllocation allow;
    streams.clear();
  }
};

struct PlanCuda {
  // What one layer counts on one stream.
  struct OnStream {
    OnStream(std::shared_ptr<RuntimeCuda::OnStream> of_stream, int64_t ffn, FfnPolicy policy)
        : runtime(std::move(of_stream)),
          train(zeroed<FfnTrainCountsCuda>(2)),
          active(zeroed<uint8_t>(ffn)),
          inference(
              made_apart([&](CudaContext& ctx) { return FfnPlansCuda(ctx, 1, ffn, policy); })) {}
    std::shared_ptr<RuntimeCuda::OnStream> runtime;
    DeviceBuffer<FfnTrainCountsCuda> train;  // of the call in flight; since the last update
    DeviceBuffer<uint8_t> active;            // [F]
    FfnPlansCuda inference;
  };
  std::map<Where, OnStream> streams;
  // Holds what the layer's calls in inference counted on all streams, as of the last update,
  // because a CUDA graph is captured on another stream than the one that measured.
  LayerActivity activity;
  // Python may release a plan while any stream of the process is captured.
  ~PlanCuda() {
    if (streams.empty()) return;
    const AllowAllocation allow;
    streams.clear();
  }
};

std::shared_ptr<RuntimeCuda> make_runtime_cuda() { return std::make_shared<RuntimeCuda>(); }
std::shared_ptr<PlanCuda> make_plan_cuda() { return std::make_shared<PlanCuda>(); }

namespace {

// A call: the plan's lock, the device of x, and its current stream.
class Call {
 public:
  Call(int64_t handle, const Tensor& x)
      : plan_(find_plan(handle)),
        lock_(plan_->runtime->mutex),
        guard_(x.get_device_index()),
        device_(x.get_device_index()) {
    TWELL_CUDA_CHECK(cudaSetDevice(device_));
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
    const Capture capture(stream_);
    where_ = {device_, stream_, capture.number};
    auto& streams = plan_->runtime->cuda->streams;
    std::erase_if(streams, [](const auto& entry) { return entry.second->graph.came(); });
    std::erase_if(plan_->cuda->streams,
                  [](const auto& entry) { return entry.second.runtime->graph.came(); });
    std::shared_ptr<RuntimeCuda::OnStream>& of_stream = streams[where_];
    if (!of_stream) of_stream = std::make_shared<RuntimeCuda::OnStream>(stream_, capture);
    runtime_ = of_stream;
  }

  CudaContext& ctx() { return runtime_->ctx; }
  Plan& plan() { return *plan_; }
  PlanCuda::OnStream& counted(int64_t ffn) {
    auto& streams = plan_->cuda->streams;
    return streams.try_emplace(where_, runtime_, ffn, plan_->policy).first->second;
  }

  FfnWorkspaceCuda& workspace(const LayerShape& shape) {
    auto& workspace = runtime_->workspaces[{shape.width, shape.ffn, shape.gated}];
    if (!workspace || workspace->max_tokens() < shape.tokens) {
      const bool captured = std::get<2>(where_) != 0;
      if (captured && workspace) runtime_->outgrown.push_back(std::move(workspace));
      workspace = nullptr;  // freed before the next one is allocated
      int64_t tokens = 64;
      while (tokens < shape.tokens) tokens *= 2;
      workspace = made_apart([&](CudaContext& ctx) {
        return std::make_unique<FfnWorkspaceCuda>(ctx, tokens, shape.width, shape.ffn, shape.gated);
      });
    }
    return *workspace;
  }

 private:
  std::shared_ptr<Plan> plan_;
  std::lock_guard<std::mutex> lock_;
  torch::stable::accelerator::DeviceGuard guard_;
  AllowAllocation allow_;
  int device_;
  cudaStream_t stream_ = nullptr;
  Where where_;
  std::shared_ptr<RuntimeCuda::OnStream> runtime_;
};

Tensor row_major(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }
Tensor empty(const Tensor& like, std::initializer_list<int64_t> size, ScalarType dtype) {
  return made(like, {size.begin(), size.size()}, dtype);
}
const __nv_bfloat16* bf16(const Tensor& t) {
  return static_cast<const __nv_bfloat16*>(t.const_data_ptr());
}
__nv_bfloat16* bf16_out(const Tensor& t) {
  return static_cast<__nv_bfloat16*>(t.mutable_data_ptr());
}
std::byte* bytes_of(const Tensor& t) { return static_cast<std::byte*>(t.mutable_data_ptr()); }

// Contiguous weights, which own the memory of the engine's view.
struct Weights {
  std::optional<Tensor> gate;
  Tensor up, down;
  LayerShape shape;

  Weights(const std::optional<Tensor>& w_gate, const Tensor& w_up, const Tensor& w_down,
          const LayerShape& of)
      : up(row_major(w_up)), down(row_major(w_down)), shape(of) {
    if (w_gate) gate = row_major(*w_gate);
  }
  const __nv_bfloat16* gate_data() const { return gate ? bf16(*gate) : nullptr; }
  FfnWeightsCuda view() const {
    return {.w_gate = gate_data(),
            .w_up = bf16(up),
            .w_down = bf16(down),
            .activation = shape.activation,
            .threshold = shape.threshold};
  }
};

FfnTrainShapeCuda train_shape(const LayerShape& shape) {
  return {.max_tokens = shape.tokens,
          .width = shape.width,
          .ffn = shape.ffn,
          .gated = shape.gated,
          .activation = shape.activation};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> ffn_train_cuda(Tensor x_in, std::optional<Tensor> w_gate,
                                                          Tensor w_up, Tensor w_down,
                                                          std::string activation, int64_t handle,
                                                          int64_t execution, int64_t nnz,
                                                          int64_t union_neurons) {
  const LayerShape shape =
      check_layer(x_in, w_gate, w_up, w_down, activation, ScalarType::BFloat16);
  Call call(handle, x_in);
  const Tensor x = row_major(x_in);
  const Weights weights(w_gate, w_up, w_down, shape);
  Tensor y = made_like(x);
  Tensor l1 = empty(x, {}, ScalarType::Float);
  Tensor counts = empty(x, {kCounts}, ScalarType::Long);
  Tensor saved =
      empty(x, {saved_bytes(shape, true, execution, nnz, union_neurons)}, ScalarType::Byte);
  PlanCuda::OnStream& counted = call.counted(shape.ffn);
  if (shape.tokens > 0) {
    call.plan().last = shape;
    const bool hybrid = execution != 0;
    const Tensor memory =
        empty(x, {FfnTrainWorkspaceCuda::bytes_needed(call.ctx(), train_shape(shape), hybrid)},
              ScalarType::Byte);
    FfnTrainWorkspaceCuda workspace(call.ctx(), train_shape(shape), hybrid, bytes_of(memory));
    FfnSavedCuda kept(call.ctx(), train_shape(shape), static_cast<FfnTrainExecution>(execution),
                      static_cast<double>(nnz), static_cast<double>(union_neurons), bytes_of(saved),
                      0);
    ffn_train_forward_cuda(call.ctx(),
                           {.tokens = shape.tokens,
                            .weights = weights.view(),
                            .x = bf16(x),
                            .y = bf16_out(y),
                            .counts = counted.train.data(),
                            .active = counted.active.data()},
                           kept, workspace);
  }
  launch_report_call({.call = counted.train.data(),
                      .totals = counted.train.data() + 1,
                      .counts = static_cast<int64_t*>(counts.mutable_data_ptr()),
                      .l1 = static_cast<float*>(l1.mutable_data_ptr())},
                     call.ctx().stream());
  return {y, l1, counts, saved};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> ffn_train_backward_cuda_op(
    Tensor d_y_in, std::optional<Tensor> d_l1, Tensor x_in, std::optional<Tensor> w_gate,
    Tensor w_up, Tensor w_down, Tensor saved, std::string activation, int64_t handle,
    int64_t execution, int64_t nnz, int64_t union_neurons) {
  const LayerShape shape =
      check_layer(x_in, w_gate, w_up, w_down, activation, ScalarType::BFloat16);
  check_gradients(d_y_in, d_l1, x_in);
  check_saved(saved, shape, true, execution, nnz, union_neurons);
  Call call(handle, x_in);
  const Tensor x = row_major(x_in);
  const Tensor d_y = row_major(d_y_in);
  const Weights weights(w_gate, w_up, w_down, shape);
  Tensor d_x = made_like(x);
  if (shape.tokens == 0) {
    const auto none = [&](const Tensor& w) {
      return torch::stable::new_zeros(w, w.sizes(), ScalarType::BFloat16);
    };
    return {d_x, w_gate ? none(*w_gate) : empty(x, {0}, ScalarType::BFloat16), none(w_up),
            none(w_down)};
  }
  const Tensor gate = empty(x, {w_gate ? shape.ffn : 0, shape.width}, ScalarType::Float);
  const Tensor up = empty(x, {shape.ffn, shape.width}, ScalarType::Float);
  const Tensor down = empty(x, {shape.ffn, shape.width}, ScalarType::Float);
  const Tensor no_l1 = d_l1 ? *d_l1 : torch::stable::new_zeros(x, {}, ScalarType::Float);
  {
    const bool hybrid = execution != 0;
    const Tensor memory =
        empty(x, {FfnTrainWorkspaceCuda::bytes_needed(call.ctx(), train_shape(shape), hybrid)},
              ScalarType::Byte);
    FfnTrainWorkspaceCuda workspace(call.ctx(), train_shape(shape), hybrid, bytes_of(memory));
    FfnSavedCuda kept(call.ctx(), train_shape(shape), static_cast<FfnTrainExecution>(execution),
                      static_cast<double>(nnz), static_cast<double>(union_neurons), bytes_of(saved),
                      shape.tokens);
    const auto grad = [](const Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); };
    ffn_train_backward_cuda(call.ctx(),
                            {.tokens = shape.tokens,
                             .weights = weights.view(),
                             .x = bf16(x),
                             .d_y = bf16(d_y),
                             .l1_scale = static_cast<const float*>(no_l1.const_data_ptr()),
                             .d_x = bf16_out(d_x),
                             .grads = {.w_gate = w_gate ? grad(gate) : nullptr,
                                       .w_up = grad(up),
                                       .w_down = grad(down),
                                       .add = false}},
                            kept, workspace);
  }
  const auto rounded = [](const Tensor& t) { return torch::stable::to(t, ScalarType::BFloat16); };
  return {d_x, w_gate ? rounded(gate) : empty(x, {0}, ScalarType::BFloat16), rounded(up),
          rounded(down)};
}

Tensor ffn_cuda(Tensor x_in, std::optional<Tensor> w_gate, Tensor w_up, Tensor w_down,
                std::string activation, int64_t handle) {
  const LayerShape shape =
      check_layer(x_in, w_gate, w_up, w_down, activation, ScalarType::BFloat16);
  Call call(handle, x_in);
  const Tensor x = row_major(x_in);
  const Weights weights(w_gate, w_up, w_down, shape);
  Tensor y = made_like(x);
  if (shape.tokens == 0) return y;
  FfnPlanCuda& plan = call.counted(shape.ffn).inference[0];
  plan.plan.policy = call.plan().policy;
  plan.activity = call.plan().cuda->activity;
  ffn_forward_cuda(
      call.ctx(),
      {.tokens = shape.tokens, .weights = weights.view(), .x = bf16(x), .y = bf16_out(y)}, plan,
      call.workspace(shape));
  return y;
}

}  // namespace

void fetch_cuda_counts(Plan& plan) {
  for (auto& [where, counted] : plan.cuda->streams) {
    const auto& [device, stream, capture] = where;
    const torch::stable::accelerator::DeviceGuard guard(device);
    TWELL_CUDA_CHECK(cudaSetDevice(device));
    CudaContext& ctx = counted.runtime->ctx;
    FfnTrainCountsCuda totals;
    std::vector<uint8_t> active(static_cast<size_t>(counted.active.size()));
    TWELL_CUDA_CHECK(cudaMemcpyAsync(&totals, counted.train.data() + 1, sizeof totals,
                                     cudaMemcpyDeviceToHost, stream));
    TWELL_CUDA_CHECK(cudaMemsetAsync(counted.train.data() + 1, 0, sizeof totals, stream));
    TWELL_CUDA_CHECK(cudaMemcpyAsync(active.data(), counted.active.data(), active.size(),
                                     cudaMemcpyDeviceToHost, stream));
    TWELL_CUDA_CHECK(cudaMemsetAsync(counted.active.data(), 0, active.size(), stream));
    const int64_t tokens_before = counted.inference[0].plan.tokens;
    const int64_t nnz_before = counted.inference[0].plan.nnz;
    counted.inference[0].activity = plan.cuda->activity;
    counted.inference.update(ctx);  // waits for the stream
    plan.cuda->activity = counted.inference[0].activity;
    plan.train.tokens += static_cast<int64_t>(totals.tokens);
    plan.train.nnz += static_cast<int64_t>(totals.nnz);
    plan.train.union_neurons += static_cast<int64_t>(totals.union_neurons);
    plan.train.max_row_nnz =
        std::max(plan.train.max_row_nnz, static_cast<int64_t>(totals.max_row_nnz));
    plan.train.recomputed += totals.recomputed;
    plan.train.l1_sum += totals.l1_sum;
    plan.active.resize(active.size());
    for (size_t j = 0; j < active.size(); ++j) plan.active[j] |= active[j];
    const FfnPlan& inference = counted.inference[0].plan;
    plan.inference.tokens += inference.tokens - tokens_before;
    plan.inference.nnz += inference.nnz - nnz_before;
    plan.inference.max_row_nnz = std::max(plan.inference.max_row_nnz, inference.max_row_nnz);
    plan.inference.execution = inference.execution;
  }
}

FfnTrainExecution choose_train_cuda(const Plan& plan, const LayerShape& shape,
                                    FfnTrainPolicy policy, double nnz, double union_share) {
  if (plan.cuda->streams.empty()) return FfnTrainExecution::kDense;
  const auto& [where, counted] = *plan.cuda->streams.begin();
  const CudaContext& ctx = counted.runtime->ctx;
  return choose_gpu_ffn_train(gpu_ffn_layer(ctx, train_shape(shape)), shape.tokens, policy,
                              {.nnz_per_token = nnz, .union_share = union_share});
}

int64_t saved_bytes_cuda(const LayerShape& shape, int64_t execution, int64_t nnz,
                         int64_t union_neurons) {
  return FfnSavedCuda::bytes_needed(train_shape(shape), static_cast<FfnTrainExecution>(execution),
                                    static_cast<double>(nnz), static_cast<double>(union_neurons));
}

}  // namespace twell::python

TWELL_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, m) {
  m.impl("ffn_train", TORCH_BOX(&twell::python::ffn_train_cuda));
  m.impl("ffn_train_backward", TORCH_BOX(&twell::python::ffn_train_backward_cuda_op));
  m.impl("ffn", TORCH_BOX(&twell::python::ffn_cuda));
}
