// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/attention/cudnn_library_cuda.h"

#ifdef TWELL_HAVE_CUDNN
#include <dlfcn.h>

namespace cudnn_frontend {
// Where the frontend looks functions up. It wants this name; set once, below.
void* cudnn_dlhandle = nullptr;
}  // namespace cudnn_frontend

namespace twell::cudnn {
namespace {

Library load() {
  Library found;
  fe::cudnn_dlhandle = ::dlopen("libcudnn.so.9", RTLD_NOW);
  if (fe::cudnn_dlhandle == nullptr) {
    const char* error = ::dlerror();
    found.status = fmt::format("cuDNN is not found ({})", error == nullptr ? "no reason" : error);
    return found;
  }
  const size_t version = fe::detail::get_backend_version();
  found.status = fmt::format("cuDNN {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
  found.loaded = true;
  return found;
}

struct Handle {
  ~Handle() {
    if (value != nullptr) fe::detail::destroy_handle(value);
  }
  cudnnHandle_t value = nullptr;
};

}  // namespace

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

cudnnHandle_t handle(CudaContext& ctx) {
  Handle& made = ctx.service<Handle>();
  if (made.value == nullptr) {
    TWELL_CHECK(fe::detail::create_handle(&made.value) == CUDNN_STATUS_SUCCESS,
                "cuDNN makes no handle");
    TWELL_CHECK(fe::detail::set_stream(made.value, ctx.stream()) == CUDNN_STATUS_SUCCESS,
                "cuDNN does not take the stream");
  }
  return made.value;
}

void check(fe::error_t error) { TWELL_CHECK(error.is_good(), "cuDNN: {}", error.get_message()); }

// Operations take these over when they are added.
Plan::Plan() {
  graph.set_io_data_type(fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
}

void prepare(CudaContext& ctx, Plan& plan) {
  cudnnHandle_t const cudnn = handle(ctx);
  fe::error_t error = plan.graph.validate();
  if (error.is_good()) error = plan.graph.build_operation_graph(cudnn);
  if (error.is_good()) error = plan.graph.create_execution_plans({fe::HeurMode_t::A});
  if (error.is_good()) error = plan.graph.check_support(cudnn);
  if (error.is_good()) error = plan.graph.build_plans(cudnn);
  if (error.is_bad()) {
    plan.refusal = error.get_message();
    return;
  }
  int64_t bytes = 0;
  check(plan.graph.get_workspace_size(bytes));
  plan.workspace = DeviceBuffer<std::byte>(bytes);
}

std::shared_ptr<fe::graph::Tensor_attributes> add_rows(Plan& plan, int64_t uid, int64_t batch,
                                                       int64_t heads, int64_t tokens,
                                                       int64_t head_dim, int64_t stride) {
  return plan.graph.tensor(fe::graph::Tensor_attributes()
                               .set_uid(uid)
                               .set_data_type(fe::DataType_t::BFLOAT16)
                               .set_dim({batch, heads, tokens, head_dim})
                               .set_stride({tokens * stride, head_dim, stride, 1}));
}

}  // namespace twell::cudnn
#endif
