// SPDX-License-Identifier: Apache-2.0
// Uniform causal attention through cuDNN's graph API.
#include <cmath>
#include <map>
#include <tuple>

#include "twell/ops/attention/attention_cuda.h"
#include "twell/ops/attention/cudnn_library_cuda.h"

#ifdef TWELL_HAVE_CUDNN

namespace twell {
namespace {

namespace fe = cudnn_frontend;

constexpr int64_t kQ = 1, kK = 2, kV = 3, kOut = 4, kLogSumExp = 5;  // tensors of the graph

// batch, tokens, heads, kv_heads, head_dim, q_stride, kv_stride, logsumexp
using PlanKey = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool>;

struct ForwardPlans {
  std::map<PlanKey, cudnn::Plan> plans;
  std::string report;
};

void build(CudaContext& ctx, cudnn::Plan& plan, const AttentionCuda& p) {
  const int64_t batch = p.sequences.count, tokens = p.sequences.max_q_len;
  const auto rows = [&](int64_t uid, int64_t heads, int64_t stride) {
    return cudnn::add_rows(plan, uid, batch, heads, tokens, p.head_dim, stride);
  };
  const auto q = rows(kQ, p.heads, p.q_stride), k = rows(kK, p.kv_heads, p.kv_stride),
             v = rows(kV, p.kv_heads, p.kv_stride);
  const auto outputs =
      plan.graph.sdpa(q, k, v,
                      fe::graph::SDPA_attributes()
                          .set_name("attention")
                          .set_generate_stats(p.logsumexp != nullptr)
                          .set_causal_mask(true)
                          .set_attn_scale(1.0f / std::sqrt(static_cast<float>(p.head_dim))));
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
  cudnn::prepare(ctx, plan);
}

}  // namespace

const char* cudnn_status() { return cudnn::library().status.c_str(); }

std::string attention_report(CudaContext& ctx) { return ctx.service<ForwardPlans>().report; }

bool attention_cudnn(CudaContext& ctx, const AttentionCuda& p) {
  ForwardPlans& cache = ctx.service<ForwardPlans>();
  if (!cudnn::library().loaded || !p.sequences.uniform) {
    if (p.sequences.uniform) cache.report = fmt::format("own kernel, cuDNN: {}", cudnn_status());
    return false;
  }
  const PlanKey key{
      p.sequences.count, p.sequences.max_q_len, p.heads, p.kv_heads, p.head_dim, p.q_stride,
      p.kv_stride,       p.logsumexp != nullptr};
  auto found = cache.plans.find(key);
  if (found == cache.plans.end()) {
    found = cache.plans.try_emplace(key).first;
    build(ctx, found->second, p);
  }
  cudnn::Plan& plan = found->second;
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
  cudnn::check(plan.graph.execute(cudnn::handle(ctx), operands, plan.workspace.data()));
  return true;
}

}  // namespace twell

#else

namespace twell {

const char* cudnn_status() { return "not part of this build (no cuDNN headers were found)"; }

std::string attention_report(CudaContext&) {
  return fmt::format("own kernel, cuDNN: {}", cudnn_status());
}

bool attention_cudnn(CudaContext&, const AttentionCuda&) { return false; }

}  // namespace twell
#endif
