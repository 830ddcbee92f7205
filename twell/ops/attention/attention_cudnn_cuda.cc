// SPDX-License-Identifier: Apache-2.0
// Causal attention through cuDNN's graph API: the forward pass of uniform batches and of ragged
// ones over a paged cache (attention_cuda.h), and a training batch's forward and backward
// (attention_train_cuda.h). This is
// the only file that includes cudnn-frontend, which takes 20 s to compile. libcudnn is loaded on
// first use, so that the program also starts without it; a build without cuDNN's headers reports
// that instead.
#include <algorithm>
#include <cmath>
#include <compare>
#include <map>
#include <memory>
#include <unordered_map>

#include "twell/base/gpu_code.h"
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
  TWELL_CHECK(s.window >= 0 && (s.window == 0 || !s.document_mask),
              "training attention with a window of {} {} a document mask", s.window,
              s.document_mask ? "beside" : "without");
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
                  kDV = 9, kMask = 10, kQLen = 11, kKvLen = 12, kQAt = 13, kOutAt = 14,
                  kKBlocks = 15, kVBlocks = 16;

using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;

// Adds a bf16 input [batch, heads, tokens, head_dim], stored token by token in rows `stride` apart.
TensorPtr add_rows(Plan& plan, int64_t uid, int64_t batch, int64_t heads, int64_t tokens,
                   int64_t head_dim, int64_t stride) {
  return plan.graph.tensor(fe::graph::Tensor_attributes()
                               .set_uid(uid)
                               .set_data_type(fe::DataType_t::BFLOAT16)
                               .set_dim({batch, heads, tokens, head_dim})
                               .set_stride({tokens * stride, head_dim, stride, 1}));
}

// Adds a document mask, which all heads share.
TensorPtr add_mask(Plan& plan, int64_t batch, int64_t tokens) {
  const int64_t row = document_mask_row(tokens);
  return plan.graph.tensor(fe::graph::Tensor_attributes()
                               .set_uid(kMask)
                               .set_data_type(fe::DataType_t::BFLOAT16)
                               .set_dim({batch, 1, tokens, tokens})
                               .set_stride({tokens * row, tokens * row, row, 1}));
}

struct PlanKey {
  int64_t count, max_q_len, max_kv_len, heads, kv_heads, head_dim, q_stride, kv_stride;
  int64_t blocks, window;  // of ragged sequences; blocks of the cache
  bool logsumexp, mask;
  bool ragged() const { return blocks > 0; }
  auto operator<=>(const PlanKey&) const = default;
};

PlanKey key_of(const AttentionCuda& p) {
  PlanKey key{.count = p.sequences.count,
              .max_q_len = p.sequences.max_q_len,
              .max_kv_len = p.sequences.max_q_len,
              .heads = p.heads,
              .kv_heads = p.kv_heads,
              .head_dim = p.head_dim,
              .q_stride = p.q_stride,
              .kv_stride = p.kv_stride,
              .blocks = 0,
              .window = 0,
              .logsumexp = p.logsumexp != nullptr,
              .mask = p.mask != nullptr};
  if (p.sequences.uniform) {
    // Only a training batch, which needs the log-sum-exp, has windows here.
    key.window = p.window < p.sequences.max_q_len ? p.window : 0;
    return key;
  }
  const AttentionRagged& ragged = p.sequences.ragged;
  key.count = ragged.count;
  key.max_q_len = ragged.max_q_len;
  key.max_kv_len = ragged.max_kv_len;
  key.blocks = p.sequences.blocks;
  key.window = p.window < ragged.max_kv_len ? p.window : 0;
  return key;
}

// Plans of the forward pass, and what the last call ran on.
struct ForwardPlans {
  std::map<PlanKey, Plan> plans;
  std::string report;
};

// Adds a contiguous int32 input.
TensorPtr add_ints(Plan& plan, int64_t uid, int64_t rows, int64_t cols = 1) {
  return plan.graph.tensor(fe::graph::Tensor_attributes()
                               .set_uid(uid)
                               .set_data_type(fe::DataType_t::INT32)
                               .set_dim({rows, 1, cols, 1})
                               .set_stride({cols, cols, 1, 1}));
}

void build(CudaContext& ctx, Plan& plan, const PlanKey& key) {
  const auto rows = [&](int64_t uid, int64_t heads, int64_t tokens, int64_t stride) {
    return add_rows(plan, uid, key.count, heads, tokens, key.head_dim, stride);
  };
  const auto offsets = [&](int64_t uid) { return add_ints(plan, uid, key.count + 1); };
  auto options = fe::graph::SDPA_attributes()
                     .set_name("attention")
                     .set_generate_stats(key.logsumexp)
                     .set_attn_scale(1.0f / std::sqrt(static_cast<float>(key.head_dim)));
  const TensorPtr q = rows(kQ, key.heads, key.max_q_len, key.q_stride);
  TensorPtr k, v;
  if (key.ragged()) {
    q->set_ragged_offset(offsets(kQAt));
    // A batch of blocks; the tables name those of a sequence.
    const auto cache = [&](int64_t uid) {
      return add_rows(plan, uid, key.blocks, key.kv_heads, kKvBlock, key.head_dim, key.kv_stride);
    };
    k = cache(kK);
    v = cache(kV);
    const auto tables = [&](int64_t uid) {
      return add_ints(plan, uid, key.count, key.max_kv_len / kKvBlock);
    };
    options.set_paged_attention_k_table(tables(kKBlocks))
        .set_paged_attention_v_table(tables(kVBlocks))
        .set_paged_attention_max_seq_len_kv(static_cast<int>(key.max_kv_len))
        .set_padding_mask(true)
        .set_seq_len_q(add_ints(plan, kQLen, key.count))
        .set_seq_len_kv(add_ints(plan, kKvLen, key.count))
        .set_diagonal_alignment(fe::DiagonalAlignment_t::BOTTOM_RIGHT)
        .set_diagonal_band_right_bound(0);
    if (key.window > 0) {
      options.set_diagonal_band_left_bound(static_cast<int>(key.window));
    }
  } else {
    k = rows(kK, key.kv_heads, key.max_kv_len, key.kv_stride);
    v = rows(kV, key.kv_heads, key.max_kv_len, key.kv_stride);
    options.set_causal_mask(true);
    if (key.window > 0) options.set_diagonal_band_left_bound(static_cast<int>(key.window));
    if (key.mask) options.set_bias(add_mask(plan, key.count, key.max_q_len));
  }
  const auto outputs = plan.graph.sdpa(q, k, v, options);
  outputs[0]
      ->set_output(true)
      .set_uid(kOut)
      .set_data_type(fe::DataType_t::BFLOAT16)
      .set_dim({key.count, key.heads, key.max_q_len, key.head_dim})
      .set_stride(
          {key.max_q_len * key.heads * key.head_dim, key.head_dim, key.heads * key.head_dim, 1});
  if (key.ragged()) outputs[0]->set_ragged_offset(offsets(kOutAt));
  if (key.logsumexp) {
    outputs[1]
        ->set_output(true)
        .set_uid(kLogSumExp)
        .set_data_type(fe::DataType_t::FLOAT)
        .set_dim({key.count, key.heads, key.max_q_len, 1})
        .set_stride({key.heads * key.max_q_len, key.max_q_len, 1, 1});
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

// The plan is for `shape.sequences` sequences at once.
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
  if (shape.window > 0) attributes.set_diagonal_band_left_bound(static_cast<int>(shape.window));
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

bool cudnn_found() { return library().loaded; }

bool attention_cudnn(CudaContext& ctx, const AttentionCuda& p) {
  const bool uniform = p.sequences.uniform;
  if (!uniform && p.sequences.ragged.count == 0) return false;
  ForwardPlans& cache = ctx.service<ForwardPlans>();
  if (uniform && p.logsumexp == nullptr && p.window > 0 && p.window < p.sequences.max_q_len) {
    cache.report = fmt::format("own kernel, which attends through a window of {}", p.window);
    return false;
  }
  if (!library().loaded) {
    cache.report = fmt::format("own kernel, cuDNN: {}", cudnn_status());
    return false;
  }
  const PlanKey key = key_of(p);
  auto found = cache.plans.find(key);
  if (found == cache.plans.end()) {
    found = cache.plans.try_emplace(key).first;
    build(ctx, found->second, key);
  }
  Plan& plan = found->second;
  cache.report =
      plan.refusal.empty()
          ? std::string(cudnn_status())
          : fmt::format("own kernel, {} refuses {} x {} tokens, {} heads of {}: {}", cudnn_status(),
                        key.count, key.max_q_len, p.heads, p.head_dim, plan.refusal);
  if (!plan.refusal.empty()) return false;
  std::unordered_map<int64_t, void*> operands = {{kQ, const_cast<__nv_bfloat16*>(p.q)},
                                                 {kK, const_cast<__nv_bfloat16*>(p.k)},
                                                 {kV, const_cast<__nv_bfloat16*>(p.v)},
                                                 {kOut, p.out}};
  if (key.logsumexp) operands[kLogSumExp] = p.logsumexp;
  if (key.mask) operands[kMask] = const_cast<__nv_bfloat16*>(p.mask);
  if (key.ragged()) {
    const AttentionRagged& ragged = p.sequences.ragged;
    operands.insert({{kQLen, ragged.q_len},
                     {kKvLen, ragged.kv_len},
                     {kQAt, ragged.q_at},
                     {kOutAt, ragged.out_at},
                     {kKBlocks, ragged.blocks},
                     {kVBlocks, ragged.blocks}});
  }
  plan.execute(ctx, operands);
  return true;
}

#else

const char* cudnn_status() { return "not part of this build (no cuDNN headers were found)"; }

std::string attention_report(CudaContext&) {
  return fmt::format("own kernel, cuDNN: {}", cudnn_status());
}

bool attention_cudnn(CudaContext&, const AttentionCuda&) { return false; }

bool cudnn_found() { return false; }

#endif

std::string attention_train_unsupported(int64_t head_dim, int64_t length) {
  if (length < 2) return "the GPU trains on sequences of at least 2 tokens";
  int device = 0, major = 0;
  TWELL_CUDA_CHECK(cudaGetDevice(&device));
  TWELL_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  const int64_t largest = seen_capability(10 * major) == 90 ? 256 : 128;
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
  p.window = s.window;
  TWELL_CHECK(attention_cudnn(ctx, p),
              "training attention with {} heads of {} on {} needs cuDNN, which has none for it: {}",
              s.heads, s.head_dim, s.kv_heads, attention_report(ctx));
}

void attention_train_backward([[maybe_unused]] CudaContext& ctx,
                              const AttentionTrainBackward& problem) {
  check_problem(problem.shape, problem.mask);
#ifdef TWELL_HAVE_CUDNN
  TWELL_CHECK(library().loaded, "attention backward needs cuDNN: {}", cudnn_status());
  const AttentionTrainShape& all = problem.shape;
  AttentionTrainShape part = all;
  part.sequences = sequences_at_once(all);
  if (part.window >= part.length) part.window = 0;
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
