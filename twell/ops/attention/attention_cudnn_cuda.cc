// SPDX-License-Identifier: Apache-2.0
// Uniform causal attention through cuDNN's graph API. cuDNN is loaded when it is first needed, so
// that the program starts without it.
#include <map>
#include <tuple>

#include "twell/ops/attention/attention_cuda.h"

#ifdef TWELL_HAVE_CUDNN
#include <dlfcn.h>

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

namespace cudnn_frontend {
// Where the frontend looks functions up. It wants this name; set once, below.
void* cudnn_dlhandle = nullptr;
}  // namespace cudnn_frontend

namespace twell {
namespace {

namespace fe = cudnn_frontend;

// Loads cuDNN once per process; says why not, or with which version.
struct Library {
  Library() {
    fe::cudnn_dlhandle = ::dlopen("libcudnn.so.9", RTLD_NOW);
    if (fe::cudnn_dlhandle == nullptr) {
      const char* error = ::dlerror();
      status = fmt::format("cuDNN is not found ({})", error == nullptr ? "no reason" : error);
      return;
    }
    const size_t version = fe::detail::get_backend_version();
    status = fmt::format("cuDNN {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
    loaded = true;
  }
  bool loaded = false;
  std::string status;
};

const Library& library() {
  static const Library loaded;
  return loaded;
}

void check(fe::error_t error) { TWELL_CHECK(error.is_good(), "cuDNN: {}", error.get_message()); }

constexpr int64_t kQ = 1, kK = 2, kV = 3, kOut = 4;  // tensors of the graph

struct Graph {
  fe::graph::Graph graph;
  DeviceBuffer<std::byte> workspace;
  bool usable = false;
};

// batch, tokens, heads, kv_heads, head_dim, q_stride, kv_stride
using GraphKey = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

struct Graphs {
  ~Graphs() {
    if (handle != nullptr) fe::detail::destroy_handle(handle);
  }
  cudnnHandle_t handle = nullptr;
  std::map<GraphKey, Graph> graphs;
};

// false where cuDNN has no kernel for the shape.
bool build(Graph& made, cudnnHandle_t handle, const AttentionCuda& p) {
  const int64_t batch = p.sequences.count, tokens = p.sequences.max_q_len;
  made.graph.set_io_data_type(fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  const auto tensor = [&](int64_t uid, int64_t heads, int64_t stride) {
    return made.graph.tensor(fe::graph::Tensor_attributes()
                                 .set_uid(uid)
                                 .set_dim({batch, heads, tokens, p.head_dim})
                                 .set_stride({tokens * stride, p.head_dim, stride, 1}));
  };
  const auto q = tensor(kQ, p.heads, p.q_stride), k = tensor(kK, p.kv_heads, p.kv_stride),
             v = tensor(kV, p.kv_heads, p.kv_stride);
  const auto outputs =
      made.graph.sdpa(q, k, v,
                      fe::graph::SDPA_attributes()
                          .set_name("attention")
                          .set_generate_stats(false)
                          .set_causal_mask(true)
                          .set_attn_scale(1.0f / std::sqrt(static_cast<float>(p.head_dim))));
  outputs[0]
      ->set_output(true)
      .set_uid(kOut)
      .set_dim({batch, p.heads, tokens, p.head_dim})
      .set_stride({tokens * p.heads * p.head_dim, p.head_dim, p.heads * p.head_dim, 1});
  if (made.graph.validate().is_bad() || made.graph.build_operation_graph(handle).is_bad() ||
      made.graph.create_execution_plans({fe::HeurMode_t::A}).is_bad() ||
      made.graph.check_support(handle).is_bad() || made.graph.build_plans(handle).is_bad()) {
    return false;
  }
  int64_t bytes = 0;
  check(made.graph.get_workspace_size(bytes));
  made.workspace = DeviceBuffer<std::byte>(bytes);
  return true;
}

}  // namespace

const char* cudnn_status() { return library().status.c_str(); }

bool attention_cudnn(CudaContext& ctx, const AttentionCuda& p) {
  if (!library().loaded || !p.sequences.uniform) return false;
  Graphs& cache = ctx.service<Graphs>();
  if (cache.handle == nullptr) {
    TWELL_CHECK(fe::detail::create_handle(&cache.handle) == CUDNN_STATUS_SUCCESS,
                "cuDNN makes no handle");
    TWELL_CHECK(fe::detail::set_stream(cache.handle, ctx.stream()) == CUDNN_STATUS_SUCCESS,
                "cuDNN does not take the stream");
  }
  const GraphKey key{
      p.sequences.count, p.sequences.max_q_len, p.heads, p.kv_heads, p.head_dim, p.q_stride,
      p.kv_stride};
  auto found = cache.graphs.find(key);
  if (found == cache.graphs.end()) {
    found = cache.graphs.try_emplace(key).first;
    found->second.usable = build(found->second, cache.handle, p);
  }
  Graph& made = found->second;
  if (!made.usable) return false;
  std::unordered_map<int64_t, void*> operands = {{kQ, const_cast<__nv_bfloat16*>(p.q)},
                                                 {kK, const_cast<__nv_bfloat16*>(p.k)},
                                                 {kV, const_cast<__nv_bfloat16*>(p.v)},
                                                 {kOut, p.out}};
  check(made.graph.execute(cache.handle, operands, made.workspace.data()));
  return true;
}

}  // namespace twell

#else

namespace twell {

const char* cudnn_status() { return "not part of this build (no cuDNN headers were found)"; }

bool attention_cudnn(CudaContext&, const AttentionCuda&) { return false; }

}  // namespace twell
#endif
