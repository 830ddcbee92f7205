// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/cross_entropy/cross_entropy_cuda.h"

#include <algorithm>

#include "twell/ops/matmul/linear_cuda.h"
#include "twell/ops/matmul/matmul_cuda.h"

namespace twell {
namespace {

// The logits of a chunk take at most 512 MiB: 4,096 tokens of a vocabulary of 49,152. Rewriting the
// weight gradient once per chunk then costs little beside its matrix product.
constexpr int64_t kMaxLogitBytes = int64_t{512} << 20;
constexpr int64_t kTile = 128;  // chunks are whole tiles of the matrix products

// The fewest chunks that fit, of equal size but for the last.
int64_t chunk_tokens(int64_t tokens, int64_t most) {
  const int64_t chunks = std::max<int64_t>(1, (tokens + most - 1) / most);
  const int64_t even = (tokens + chunks - 1) / chunks;
  return std::min(most, (even + kTile - 1) / kTile * kTile);
}

int64_t workspace_tokens(int64_t max_tokens, int64_t vocab) {
  const int64_t row = vocab * static_cast<int64_t>(sizeof(__nv_bfloat16));
  const int64_t most = std::max(kTile, kMaxLogitBytes / row / kTile * kTile);
  return std::min(max_tokens, chunk_tokens(max_tokens, most));
}

}  // namespace

CrossEntropyWorkspaceCuda::CrossEntropyWorkspaceCuda(int64_t max_tokens, int64_t vocab)
    : vocab_(vocab),
      chunk_(workspace_tokens(max_tokens, vocab)),
      owned_(chunk_ * vocab),
      logits_(owned_.data()) {}

CrossEntropyWorkspaceCuda::CrossEntropyWorkspaceCuda(int64_t max_tokens, int64_t vocab,
                                                     std::byte* memory)
    : vocab_(vocab),
      chunk_(workspace_tokens(max_tokens, vocab)),
      logits_(reinterpret_cast<__nv_bfloat16*>(memory)) {}

int64_t CrossEntropyWorkspaceCuda::bytes_needed(int64_t max_tokens, int64_t vocab) {
  return workspace_tokens(max_tokens, vocab) * vocab * static_cast<int64_t>(sizeof(__nv_bfloat16));
}

void cross_entropy_cuda(CudaContext& ctx, const CrossEntropyCuda& problem,
                        const CrossEntropyWorkspaceCuda& workspace) {
  TWELL_CHECK(problem.vocab == workspace.vocab_, "cross-entropy: {} logits in a workspace for {}",
              problem.vocab, workspace.vocab_);
  TWELL_CHECK((problem.d_x == nullptr) == (problem.d_weight == nullptr),
              "cross-entropy needs both gradients or neither");
  __nv_bfloat16* const logits = workspace.logits_;
  const bool backward = problem.d_x != nullptr;
  for (int64_t begin = 0; begin < problem.tokens; begin += workspace.chunk_) {
    const int64_t count = std::min(workspace.chunk_, problem.tokens - begin);
    const __nv_bfloat16* const x = problem.x + begin * problem.width;
    linear_cuda(ctx, {.rows = count,
                      .cols = problem.vocab,
                      .inner = problem.width,
                      .x = x,
                      .w = problem.weight,
                      .y = logits});
    TWELL_CUDA_CHECK(launch_softmax_gradient({.tokens = count,
                                              .vocab = problem.vocab,
                                              .logits = logits,
                                              .targets = problem.targets + begin,
                                              .losses = problem.losses + begin,
                                              .gradient = backward,
                                              .grad_scale = problem.grad_scale},
                                             ctx.stream()));
    if (!backward) continue;
    linear_backward_cuda(ctx, {.rows = count,
                               .cols = problem.vocab,
                               .inner = problem.width,
                               .x = x,
                               .w = problem.weight,
                               .d_y = logits,
                               .d_x = problem.d_x + begin * problem.width,
                               .d_w = problem.d_weight,
                               .d_w_add = problem.add || begin > 0});
  }
  if (problem.sum != nullptr) {
    TWELL_CUDA_CHECK(launch_loss_sum({problem.tokens, problem.losses, problem.targets, problem.sum},
                                     ctx.stream()));
  }
}

}  // namespace twell
