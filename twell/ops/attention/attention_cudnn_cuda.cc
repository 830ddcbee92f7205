// SPDX-License-Identifier: Apache-2.0
// Causal attention through cuDNN's graph API: the forward pass of uniform batches
// (attention_cuda.h) and a training batch's forward and backward (attention_train_cuda.h). This is
// the only file that includes cudnn-frontend, which takes 20 s to compile. libcudnn is loaded on
// first use, so that the program also starts without it; a build without cuDNN's headers reports
// that instead.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <tuple>
#include <unordered_map>

#include "twell/ops/attention/attention_cuda.h"
#include "twell/ops/attention/attention_train_cuda.h"

#ifdef TWELL_HAVE_CUDNN
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>
#include <dlfcn.h>

namespace cudnn_frontend {
// The frontend resolves cuDNN's functions through this handle, whose name it prescribes.
void* cudnn_dlhandle = nullptr;
}  // namespace cudnn_frontend
#endif

namespace twell {
namespace {

void check_problem(const AttentionTrainShape& s, const __nv_bfloat16* mask) {
  TWELL_CHECK(s.sequences > 0 && s.length > 1 && s.kv_heads > 0 && s.heads % s.kv_heads == 0,
              "training attention of {} sequences of {} tokens (2 at least) with {} heads on {} "
              "key/value heads",
              s.sequences, s.length, s.heads, s.kv_heads);
  TWELL_CHECK((mask != nullptr) == s.document_mask, "training attention {} a document mask",
              mask == nullptr ? "lacks" : "has no use for");
}

#ifdef TWELL_HAVE_CUDNN
namespace fe = cudnn_frontend;

struct Library {
  bool loaded = false;
  std::string status;  // the version, or why cuDNN is not there
};

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

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

void check(fe::error_t error) { TWELL_CHECK(error.is_good(), "cuDNN: {}", error.get_message()); }

struct Handle {
  ~Handle() {
    if (value != nullptr) fe::detail::destroy_handle(value);
  }
  cudnnHandle_t value = nullptr;
};

// The context's handle, which works on the context's stream.
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

// A compiled graph with its workspace.
struct Plan {
  // Tensors are bf16, intermediate values and arithmetic f32. Operations copy these types when they
  // are added, so they are set first.
  Plan() {
    graph.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  // Compiles `graph` once its operations are added, and allocates its workspace.
  void compile(CudaContext& ctx) {
    cudnnHandle_t const cudnn = handle(ctx);
    fe::error_t error = graph.validate();
    if (error.is_good()) error = graph.build_operation_graph(cudnn);
    if (error.is_good()) error = graph.create_execution_plans({fe::HeurMode_t::A});
    if (error.is_good()) error = graph.check_support(cudnn);
    if (error.is_good()) error = graph.build_plans(cudnn);
    if (error.is_bad()) {
      refusal = error.get_message();
      return;
    }
    int64_t bytes = 0;
    check(graph.get_workspace_size(bytes));
    workspace = DeviceBuffer<std::byte>(bytes);
  }

  void execute(CudaContext& ctx, std::unordered_map<int64_t, void*> operands) {
    check(graph.execute(handle(ctx), operands, workspace.data()));
  }

  fe::graph::Graph graph;
  DeviceBuffer<std::byte> workspace;
  std::string refusal;  // why cuDNN has no kernel for the graph; empty when it has one
};

// Tensors of both graphs, by the ids that execute() binds pointers to.
constexpr int64_t kQ = 1, kK = 2, kV = 3, kOut = 4, kLogSumExp = 5, kDOut = 6, kDQ = 7, kDK = 8,
                  kDV = 9, kMask = 10;

// Adds a bf16 input [batch, heads, tokens, head_dim], stored token by token in rows `stride` apart.
std::shared_ptr<fe::graph::Tensor_attributes> add_rows(Plan& plan, int64_t uid, int64_t batch,
                                                       int64_t heads, int64_t tokens,
                                                       int64_t head_dim, int64_t stride) {
  return plan.graph.tensor(fe::graph::Tensor_attributes()
                               .set_uid(uid)
                               .set_data_type(fe::DataType_t::BFLOAT16)
                               .set_dim({batch, heads, tokens, head_dim})
                               .set_stride({tokens * stride, head_dim, stride, 1}));
}

// Adds a document mask, which all heads share.
std::shared_ptr<fe::graph::Tensor_attributes> add_mask(Plan& plan, int64_t batch, int64_t tokens) {
  const int64_t row = document_mask_row(tokens);
  return plan.graph.tensor(fe::graph::Tensor_attributes()
                               .set_uid(kMask)
                               .set_data_type(fe::DataType_t::BFLOAT16)
                               .set_dim({batch, 1, tokens, tokens})
                               .set_stride({tokens * row, tokens * row, row, 1}));
}

// batch, tokens, heads, kv_heads, head_dim, q_stride, kv_stride, logsumexp, mask
using PlanKey =
    std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool>;

// Plans of the forward pass, and what the last call ran on.
struct ForwardPlans {
  std::map<PlanKey, Plan> plans;
  std::string report;
};

void build(CudaContext& ctx, Plan& plan, const AttentionCuda& p) {
  const int64_t batch = p.sequences.count, tokens = p.sequences.max_q_len;
  const auto rows = [&](int64_t uid, int64_t heads, int64_t stride) {
    return add_rows(plan, uid, batch, heads, tokens, p.head_dim, stride);
  };
  const auto q = rows(kQ, p.heads, p.q_stride), k = rows(kK, p.kv_heads, p.kv_stride),
             v = rows(kV, p.kv_heads, p.kv_stride);
  fe::graph::SDPA_attributes attributes;
  attributes.set_name("attention")
      .set_generate_stats(p.logsumexp != nullptr)
      .set_causal_mask(true)
      .set_attn_scale(1.0f / std::sqrt(static_cast<float>(p.head_dim)));
  auto mask = p.mask == nullptr ? nullptr : add_mask(plan, batch, tokens);
  if (mask != nullptr) attributes.set_bias(mask);
  const auto outputs = plan.graph.sdpa(q, k, v, attributes);
  outputs[0]
      ->set_output(true)
      .set_uid(kOut)
      .set_data_type(fe::DataType_t::BFLOAT16)
      .set_dim({batch, p.heads, tokens, p.head_dim})
      .set_stride({tokens * p.heads * p.head_dim, p.head_dim, p.heads * p.head_dim, 1});
  if (p.logsumexp != nullptr) {
    outputs[1]
        ->set_output(true)
        .set_uid(kLogSumExp)
        .set_data_type(fe::DataType_t::FLOAT)
        .set_dim({batch, p.heads, tokens, 1})
        .set_stride({p.heads * tokens, tokens, 1, 1});
  }
  plan.compile(ctx);
}

// Sequences per call of cuDNN: a divisor of their number.
int64_t sequences_at_once(const AttentionTrainShape& s) {
  const int64_t padded = (s.length + 127) / 128 * 128;
  const int64_t bytes = s.heads * padded * padded * static_cast<int64_t>(sizeof(__nv_bfloat16));
  int64_t count = std::clamp<int64_t>(kMaxScoreBytes / bytes, 1, s.sequences);
  while (s.sequences % count != 0) --count;
  return count;
}

struct BackwardPlans {
  std::map<AttentionTrainShape, Plan> plans;
};

// For `shape.sequences` sequences at once.
void build(CudaContext& ctx, Plan& plan, const AttentionTrainShape& shape) {
  const auto rows = [&](int64_t uid, int64_t heads, int64_t stride) {
    return add_rows(plan, uid, shape.sequences, heads, shape.length, shape.head_dim, stride);
  };
  const int64_t row = shape.row(), out_row = shape.heads * shape.head_dim;
  const auto q = rows(kQ, shape.heads, row), k = rows(kK, shape.kv_heads, row),
             v = rows(kV, shape.kv_heads, row), out = rows(kOut, shape.heads, out_row),
             d_out = rows(kDOut, shape.heads, out_row);
  const auto logsumexp =
      plan.graph.tensor(fe::graph::Tensor_attributes()
                            .set_uid(kLogSumExp)
                            .set_data_type(fe::DataType_t::FLOAT)
                            .set_dim({shape.sequences, shape.heads, shape.length, 1})
                            .set_stride({shape.heads * shape.length, shape.length, 1, 1}));
  fe::graph::SDPA_backward_attributes attributes;
  attributes.set_name("attention_backward")
      .set_causal_mask(true)
      .set_deterministic_algorithm(true)
      .set_attn_scale(1.0f / std::sqrt(static_cast<float>(shape.head_dim)));
  if (shape.document_mask) attributes.set_bias(add_mask(plan, shape.sequences, shape.length));
  const auto gradients = plan.graph.sdpa_backward(q, k, v, out, d_out, logsumexp, attributes);
  const int64_t heads[] = {shape.heads, shape.kv_heads, shape.kv_heads};
  for (size_t i = 0; i < gradients.size(); ++i) {
    gradients[i]
        ->set_output(true)
        .set_uid(kDQ + static_cast<int64_t>(i))
        .set_data_type(fe::DataType_t::BFLOAT16)
        .set_dim({shape.sequences, heads[i], shape.length, shape.head_dim})
        .set_stride({shape.length * row, shape.head_dim, row, 1});
  }
  plan.compile(ctx);
}
#endif

}  // namespace

#ifdef TWELL_HAVE_CUDNN

const char* cudnn_status() { return library().status.c_str(); }

std::string attention_report(CudaContext& ctx) { return ctx.service<ForwardPlans>().report; }

bool attention_cudnn(CudaContext& ctx, const AttentionCuda& p) {
  ForwardPlans& cache = ctx.service<ForwardPlans>();
  if (p.sequences.uniform && p.window > 0 && p.window < p.sequences.max_q_len) {
    cache.report = fmt::format("own kernel, which attends through a window of {}", p.window);
    return false;
  }
  if (!library().loaded || !p.sequences.uniform) {
    if (p.sequences.uniform) cache.report = fmt::format("own kernel, cuDNN: {}", cudnn_status());
    return false;
  }
  const PlanKey key{p.sequences.count, p.sequences.max_q_len,
                    p.heads,           p.kv_heads,
                    p.head_dim,        p.q_stride,
                    p.kv_stride,       p.logsumexp != nullptr,
                    p.mask != nullptr};
  auto found = cache.plans.find(key);
  if (found == cache.plans.end()) {
    found = cache.plans.try_emplace(key).first;
    build(ctx, found->second, p);
  }
  Plan& plan = found->second;
  cache.report = plan.refusal.empty()
                     ? std::string(cudnn_status())
                     : fmt::format("own kernel, {} refuses {} x {} tokens, {} heads of {}: {}",
                                   cudnn_status(), p.sequences.count, p.sequences.max_q_len,
                                   p.heads, p.head_dim, plan.refusal);
  if (!plan.refusal.empty()) return false;
  std::unordered_map<int64_t, void*> operands = {{kQ, const_cast<__nv_bfloat16*>(p.q)},
                                                 {kK, const_cast<__nv_bfloat16*>(p.k)},
                                                 {kV, const_cast<__nv_bfloat16*>(p.v)},
                                                 {kOut, p.out}};
  if (p.logsumexp != nullptr) operands[kLogSumExp] = p.logsumexp;
  if (p.mask != nullptr) operands[kMask] = const_cast<__nv_bfloat16*>(p.mask);
  plan.execute(ctx, operands);
  return true;
}

#else

const char* cudnn_status() { return "not part of this build (no cuDNN headers were found)"; }

std::string attention_report(CudaContext&) {
  return fmt::format("own kernel, cuDNN: {}", cudnn_status());
}

bool attention_cudnn(CudaContext&, const AttentionCuda&) { return false; }

#endif

std::string attention_train_unsupported(int64_t head_dim, int64_t length) {
  if (length < 2) return "the GPU trains on sequences of at least 2 tokens";
  int device = 0, major = 0;
  TWELL_CUDA_CHECK(cudaGetDevice(&device));
  TWELL_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  const int64_t largest = major == 9 ? 256 : 128;
  if (head_dim % 8 != 0 || head_dim > largest) {
    return fmt::format("this GPU trains heads of a multiple of 8, at most {}, got {}", largest,
                       head_dim);
  }
#ifdef TWELL_HAVE_CUDNN
  if (library().loaded) return {};
#endif
  return fmt::format("training on the GPU needs cuDNN: {}", cudnn_status());
}

void attention_train_forward(CudaContext& ctx, const AttentionTrainForward& problem) {
  const AttentionTrainShape& s = problem.shape;
  check_problem(s, problem.mask);
  const int64_t q_width = s.heads * s.head_dim, kv_width = s.kv_heads * s.head_dim;
  AttentionCuda p;
  p.heads = s.heads;
  p.kv_heads = s.kv_heads;
  p.head_dim = s.head_dim;
  p.sequences.count = s.sequences;
  p.sequences.max_q_len = s.length;
  p.sequences.uniform = true;
  p.q = problem.qkv;
  p.q_stride = s.row();
  p.k = problem.qkv + q_width;
  p.v = problem.qkv + q_width + kv_width;
  p.kv_stride = s.row();
  p.out = problem.out;
  p.logsumexp = problem.logsumexp;
  p.mask = problem.mask;
  TWELL_CHECK(attention_cudnn(ctx, p),
              "training attention with {} heads of {} on {} needs cuDNN, which has none for it: {}",
              s.heads, s.head_dim, s.kv_heads, cudnn_status());
}

void attention_train_backward([[maybe_unused]] CudaContext& ctx,
                              const AttentionTrainBackward& problem) {
  check_problem(problem.shape, problem.mask);
#ifdef TWELL_HAVE_CUDNN
  TWELL_CHECK(library().loaded, "attention backward needs cuDNN: {}", cudnn_status());
  const AttentionTrainShape& all = problem.shape;
  AttentionTrainShape part = all;
  part.sequences = sequences_at_once(all);
  BackwardPlans& cache = ctx.service<BackwardPlans>();
  auto found = cache.plans.find(part);
  if (found == cache.plans.end()) {
    found = cache.plans.try_emplace(part).first;
    build(ctx, found->second, part);
  }
  Plan& plan = found->second;
  TWELL_CHECK(plan.refusal.empty(),
              "{} has no deterministic attention backward for {} x {} tokens, {} heads of {} on {}:"
              " {}",
              cudnn_status(), part.sequences, part.length, part.heads, part.head_dim, part.kv_heads,
              plan.refusal);
  const int64_t q_width = all.heads * all.head_dim, kv_width = all.kv_heads * all.head_dim;
  for (int64_t begin = 0; begin < all.sequences; begin += part.sequences) {
    const int64_t token = begin * all.length;
    auto* const qkv = const_cast<__nv_bfloat16*>(problem.qkv) + token * all.row();
    __nv_bfloat16* const d_qkv = problem.d_qkv + token * all.row();
    std::unordered_map<int64_t, void*> operands = {
        {kQ, qkv},
        {kK, qkv + q_width},
        {kV, qkv + q_width + kv_width},
        {kOut, const_cast<__nv_bfloat16*>(problem.out) + token * q_width},
        {kLogSumExp, const_cast<float*>(problem.logsumexp) + token * all.heads},
        {kDOut, const_cast<__nv_bfloat16*>(problem.d_out) + token * q_width},
        {kDQ, d_qkv},
        {kDK, d_qkv + q_width},
        {kDV, d_qkv + q_width + kv_width}};
    if (all.document_mask) {
      operands[kMask] =
          const_cast<__nv_bfloat16*>(problem.mask) + token * document_mask_row(all.length);
    }
    plan.execute(ctx, operands);
  }
#else
  TWELL_CHECK(false, "attention backward on the GPU: cuDNN is {}", cudnn_status());
#endif
}

}  // namespace twell
