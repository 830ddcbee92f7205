// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/attention/attention_cuda.h"

#include <algorithm>

namespace twell {
namespace {

constexpr int64_t kSplitKeys = 256;  // minimum: with fewer, combining costs as much as a split
constexpr int64_t kMaxSplits = 64;   // bounds the workspace for long contexts

AttentionSplits split_keys(int64_t max_sequences, int64_t max_kv_len) {
  const int64_t share = (max_kv_len + kMaxSplits - 1) / kMaxSplits;
  AttentionSplits splits;
  splits.max_sequences = max_sequences;
  splits.keys = std::max(kSplitKeys, (share + kSplitKeys - 1) / kSplitKeys * kSplitKeys);
  splits.count = (max_kv_len + splits.keys - 1) / splits.keys;
  return splits;
}

int64_t partial_results(const AttentionSplits& splits, int64_t heads) {
  return splits.count == 1 ? 0 : splits.max_sequences * heads * splits.count;
}

}  // namespace

AttentionWorkspaceCuda::AttentionWorkspaceCuda(int64_t max_sequences, int64_t heads,
                                               int64_t head_dim, int64_t max_kv_len)
    : splits_(split_keys(max_sequences, max_kv_len)),
      partial_(partial_results(splits_, heads) * (head_dim + 2)),
      arrived_(max_sequences * heads) {
  splits_.values = partial_.data();
  splits_.max_sum = partial_.data() + partial_results(splits_, heads) * head_dim;
  splits_.arrived = arrived_.data();
  TWELL_CUDA_CHECK(cudaMemset(arrived_.data(), 0, static_cast<size_t>(arrived_.bytes())));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));  // our streams do not wait for it
}

int64_t AttentionWorkspaceCuda::bytes_needed(int64_t max_sequences, int64_t heads, int64_t head_dim,
                                             int64_t max_kv_len) {
  return partial_results(split_keys(max_sequences, max_kv_len), heads) * (head_dim + 2) *
             static_cast<int64_t>(sizeof(float)) +
         max_sequences * heads * static_cast<int64_t>(sizeof(int32_t));
}

const char* attention_unsupported(int64_t head_dim) {
  if (head_dim % 8 != 0) return "attention on the GPU needs a head size that is a multiple of 8";
  if (head_dim > 256) return "attention on the GPU takes heads of at most 256";
  return nullptr;
}

void attention_cuda(CudaContext& ctx, const AttentionCuda& problem,
                    const AttentionWorkspaceCuda& workspace) {
  const char* why = attention_unsupported(problem.head_dim);
  TWELL_CHECK(why == nullptr, "{}, got {}", why, problem.head_dim);
  TWELL_CHECK(problem.kv_heads > 0 && problem.heads % problem.kv_heads == 0,
              "attention: {} heads on {} key/value heads", problem.heads, problem.kv_heads);
  if (problem.sequences.count == 0 || problem.sequences.max_q_len == 0) return;
  if (problem.sequences.max_q_len == 1 && !problem.sequences.uniform) {
    TWELL_CHECK(problem.sequences.count <= workspace.splits().max_sequences,
                "attention: {} sequences in a workspace for {}", problem.sequences.count,
                workspace.splits().max_sequences);
    TWELL_CUDA_CHECK(launch_attention_decode(problem, workspace.splits(), ctx.stream()));
    return;
  }
  if (problem.sequences.uniform && attention_cudnn(ctx, problem)) return;
  TWELL_CUDA_CHECK(launch_attention_tiled(problem, ctx.stream()));
}

}  // namespace twell
