// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/embedding/embedding_cuda.h"

namespace twell {
namespace {

int64_t border_values(int64_t tokens, int64_t width) {
  return 2 * ((tokens + kEmbeddingPiece - 1) / kEmbeddingPiece) * width;
}

int64_t sort_bytes(int64_t tokens) {
  size_t bytes = 0;
  TWELL_CUDA_CHECK(token_sort_bytes(tokens, &bytes));
  return static_cast<int64_t>(bytes);
}

}  // namespace

EmbeddingWorkspaceCuda::EmbeddingWorkspaceCuda(int64_t max_tokens, int64_t width)
    : max_tokens_(max_tokens),
      width_(width),
      numbers_(3 * max_tokens),
      borders_(border_values(max_tokens, width)),
      sort_memory_(sort_bytes(max_tokens)) {}

int64_t EmbeddingWorkspaceCuda::bytes_needed(int64_t max_tokens, int64_t width) {
  return 3 * max_tokens * static_cast<int64_t>(sizeof(int32_t)) +
         border_values(max_tokens, width) * static_cast<int64_t>(sizeof(float)) +
         sort_bytes(max_tokens);
}

void embedding_backward_cuda(CudaContext& ctx, const EmbeddingBackwardCuda& problem,
                             const EmbeddingWorkspaceCuda& workspace) {
  const int64_t tokens = problem.tokens;
  TWELL_CHECK(problem.width % 8 == 0, "embedding backward: width {} is no multiple of 8",
              problem.width);
  TWELL_CHECK(tokens <= workspace.max_tokens_ && problem.width == workspace.width_,
              "embedding backward: [{}, {}] in a workspace for [{}, {}]", tokens, problem.width,
              workspace.max_tokens_, workspace.width_);
  if (tokens == 0) return;
  int32_t* const iota = workspace.numbers_.data();
  TokenSort sort;
  sort.tokens = tokens;
  sort.vocab = problem.vocab;
  sort.ids = problem.ids;
  sort.iota = iota;
  sort.sorted_ids = iota + workspace.max_tokens_;
  sort.sorted_tokens = iota + 2 * workspace.max_tokens_;
  sort.memory = workspace.sort_memory_.data();
  sort.memory_bytes = static_cast<size_t>(workspace.sort_memory_.bytes());
  TWELL_CUDA_CHECK(launch_token_sort(sort, ctx.stream()));
  TWELL_CUDA_CHECK(
      launch_embedding_sums({tokens, problem.width, sort.sorted_ids, sort.sorted_tokens,
                             problem.d_out, workspace.borders_.data(), problem.d_table},
                            ctx.stream()));
}

}  // namespace twell
