// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/attention/attention_train_cuda.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "twell/ops/attention/attention_cuda.h"
#include "twell/ops/attention/cudnn_library_cuda.h"

namespace twell {
namespace {

void check_shape(const AttentionTrainShape& s) {
  TWELL_CHECK(s.sequences > 0 && s.length > 1 && s.kv_heads > 0 && s.heads % s.kv_heads == 0,
              "training attention of {} sequences of {} tokens (2 at least) with {} heads on {} "
              "key/value heads",
              s.sequences, s.length, s.heads, s.kv_heads);
}

#ifdef TWELL_HAVE_CUDNN
namespace fe = cudnn_frontend;

constexpr int64_t kQ = 1, kK = 2, kV = 3, kOut = 4, kLogSumExp = 5, kDOut = 6, kDQ = 7, kDK = 8,
                  kDV = 9;  // tensors of the graph

// Sequences that one call of cuDNN takes: a divisor of all of them.
int64_t sequences_at_once(const AttentionTrainShape& s) {
  const int64_t padded = (s.length + 127) / 128 * 128;
  const int64_t bytes = s.heads * padded * padded * static_cast<int64_t>(sizeof(__nv_bfloat16));
  int64_t count = std::clamp<int64_t>(kMaxScoreBytes / bytes, 1, s.sequences);
  while (s.sequences % count != 0) --count;
  return count;
}

struct BackwardPlans {
  std::map<AttentionTrainShape, cudnn::Plan> plans;
};

// For `shape.sequences` sequences at once.
void build(CudaContext& ctx, cudnn::Plan& plan, const AttentionTrainShape& shape) {
  const auto rows = [&](int64_t uid, int64_t heads, int64_t stride) {
    return cudnn::add_rows(plan, uid, shape.sequences, heads, shape.length, shape.head_dim, stride);
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
  const auto gradients = plan.graph.sdpa_backward(
      q, k, v, out, d_out, logsumexp,
      fe::graph::SDPA_backward_attributes()
          .set_name("attention_backward")
          .set_causal_mask(true)
          .set_deterministic_algorithm(true)
          .set_attn_scale(1.0f / std::sqrt(static_cast<float>(shape.head_dim))));
  const int64_t heads[] = {shape.heads, shape.kv_heads, shape.kv_heads};
  for (size_t i = 0; i < gradients.size(); ++i) {
    gradients[i]
        ->set_output(true)
        .set_uid(kDQ + static_cast<int64_t>(i))
        .set_data_type(fe::DataType_t::BFLOAT16)
        .set_dim({shape.sequences, heads[i], shape.length, shape.head_dim})
        .set_stride({shape.length * row, shape.head_dim, row, 1});
  }
  cudnn::prepare(ctx, plan);
}
#endif

}  // namespace

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
  if (cudnn::library().loaded) return {};
#endif
  return fmt::format("training on the GPU needs cuDNN: {}", cudnn_status());
}

void attention_train_forward(CudaContext& ctx, const AttentionTrainForward& problem) {
  const AttentionTrainShape& s = problem.shape;
  check_shape(s);
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
  TWELL_CHECK(attention_cudnn(ctx, p),
              "training attention with {} heads of {} on {} needs cuDNN, which has none for it: {}",
              s.heads, s.head_dim, s.kv_heads, cudnn_status());
}

void attention_train_backward([[maybe_unused]] CudaContext& ctx,
                              const AttentionTrainBackward& problem) {
  check_shape(problem.shape);
#ifdef TWELL_HAVE_CUDNN
  TWELL_CHECK(cudnn::library().loaded, "attention backward needs cuDNN: {}", cudnn_status());
  const AttentionTrainShape& all = problem.shape;
  AttentionTrainShape part = all;
  part.sequences = sequences_at_once(all);
  BackwardPlans& cache = ctx.service<BackwardPlans>();
  auto found = cache.plans.find(part);
  if (found == cache.plans.end()) {
    found = cache.plans.try_emplace(part).first;
    build(ctx, found->second, part);
  }
  cudnn::Plan& plan = found->second;
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
    cudnn::check(plan.graph.execute(cudnn::handle(ctx), operands, plan.workspace.data()));
  }
#else
  TWELL_CHECK(false, "attention backward on the GPU: cuDNN is {}", cudnn_status());
#endif
}

}  // namespace twell
