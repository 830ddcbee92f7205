// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "twell/base/reduce.cuh"
#include "twell/base/rounding.h"
#include "twell/ops/cross_entropy/cross_entropy_cuda.h"
#include "twell/ops/matmul/linear_cuda.h"

namespace twell {
namespace {

// The largest value so far, and the sum of exponentials relative to it.
struct LogSum {
  float top = -INFINITY;
  float sum = 0.0f;

  __device__ void add(float other_top, float other_sum) {
    const float new_top = fmaxf(top, other_top);
    if (new_top == -INFINITY) return;
    sum = sum * expf(top - new_top) + other_sum * expf(other_top - new_top);
    top = new_top;
  }
};

// Reduces over the block; every thread gets the same bits.
template <int kThreads>
__device__ LogSum block_log_sum(LogSum mine) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float tops[kWarps], sums[kWarps];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float top = __shfl_xor_sync(0xffffffffu, mine.top, offset);
    const float sum = __shfl_xor_sync(0xffffffffu, mine.sum, offset);
    mine.add(top, sum);
  }
  if (threadIdx.x % 32 == 0) {
    tops[threadIdx.x / 32] = mine.top;
    sums[threadIdx.x / 32] = mine.sum;
  }
  __syncthreads();
  LogSum total;
  for (int warp = 0; warp < kWarps; ++warp) total.add(tops[warp], sums[warp]);
  return total;
}

// Two blocks fill an SM, so that their rows are still in the L2 when they are read a second time.
constexpr int kThreads = 1024;

template <int kPiece>
struct alignas(2 * kPiece) Piece {
  __nv_bfloat16 value[kPiece];
};

// One block per row, kPiece values per access; V is a multiple of kPiece.
template <int kPiece>
__global__ void __launch_bounds__(kThreads) softmax_gradient_kernel(SoftmaxGradient p) {
  const int64_t pieces = p.vocab / kPiece;
  auto* const row = reinterpret_cast<Piece<kPiece>*>(p.logits) + blockIdx.x * pieces;
  const int32_t target = p.targets[blockIdx.x];
  if (target < 0) {
    if (threadIdx.x == 0) p.losses[blockIdx.x] = 0.0f;
    if (!p.gradient) return;
    const Piece<kPiece> zeros = {};
    for (int64_t i = threadIdx.x; i < pieces; i += kThreads) row[i] = zeros;
    return;
  }
  LogSum mine;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < pieces; i += kThreads) {
    const Piece<kPiece> piece = row[i];
    float top = mine.top;
#pragma unroll
    for (int k = 0; k < kPiece; ++k) top = fmaxf(top, __bfloat162float(piece.value[k]));
    if (top == -INFINITY) continue;
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kPiece; ++k) sum += __expf(__bfloat162float(piece.value[k]) - top);
    mine.sum = mine.sum * __expf(mine.top - top) + sum;
    mine.top = top;
  }
  const LogSum total = block_log_sum<kThreads>(mine);
  const float at_target = __bfloat162float(p.logits[blockIdx.x * p.vocab + target]);
  if (threadIdx.x == 0) p.losses[blockIdx.x] = logf(total.sum) + (total.top - at_target);
  if (!p.gradient) return;
  __syncthreads();  // all threads have read the target's logit
  const float grad_scale = p.scale == nullptr ? p.grad_scale : p.grad_scale * *p.scale;
  const float scale = grad_scale / total.sum;
  const int64_t target_piece = target / kPiece;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < pieces; i += kThreads) {
    Piece<kPiece> piece = row[i];
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      float gradient = scale * __expf(__bfloat162float(piece.value[k]) - total.top);
      if (i == target_piece && k == target % kPiece) gradient -= grad_scale;
      piece.value[k] = __float2bfloat16(gradient);
    }
    row[i] = piece;
  }
}

// The teacher's log-sum, and the sum of its exponentials times the difference of logits.
struct WeightedLogSum {
  LogSum log_sum;
  float weighted = 0.0f;

  __device__ void add(const WeightedLogSum& other) {
    const float top = fmaxf(log_sum.top, other.log_sum.top);
    if (top == -INFINITY) return;
    weighted = weighted * expf(log_sum.top - top) + other.weighted * expf(other.log_sum.top - top);
    log_sum.add(other.log_sum.top, other.log_sum.sum);
  }
};

// Reduces over the block; every thread gets the same bits.
template <int kThreads>
__device__ WeightedLogSum block_weighted_log_sum(WeightedLogSum mine) {
  constexpr int kWarps = kThreads / 32;
  __shared__ WeightedLogSum of_warp[kWarps];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    mine.add({{__shfl_xor_sync(0xffffffffu, mine.log_sum.top, offset),
               __shfl_xor_sync(0xffffffffu, mine.log_sum.sum, offset)},
              __shfl_xor_sync(0xffffffffu, mine.weighted, offset)});
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  WeightedLogSum total;
  for (int warp = 0; warp < kWarps; ++warp) total.add(of_warp[warp]);
  return total;
}

// As softmax_gradient_kernel, with a teacher. KL(t || m) = sum of p_t * (t - m) - log-sum of t +
// log-sum of m.
template <int kPiece>
__global__ void __launch_bounds__(kThreads) distillation_kernel(SoftmaxGradient p) {
  const int64_t pieces = p.vocab / kPiece;
  auto* const row = reinterpret_cast<Piece<kPiece>*>(p.logits) + blockIdx.x * pieces;
  const auto* const teacher =
      reinterpret_cast<const Piece<kPiece>*>(p.teacher) + blockIdx.x * pieces;
  const int32_t target = p.targets[blockIdx.x];
  if (target < 0) {
    if (threadIdx.x == 0) p.losses[blockIdx.x] = p.kl[blockIdx.x] = 0.0f;
    const Piece<kPiece> zeros = {};
    for (int64_t i = threadIdx.x; i < pieces; i += kThreads) row[i] = zeros;
    return;
  }
  LogSum mine;
  WeightedLogSum of_teacher;
  for (int64_t i = threadIdx.x; i < pieces; i += kThreads) {
    const Piece<kPiece> piece = row[i], other = teacher[i];
    float top = mine.top, teacher_top = of_teacher.log_sum.top;
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      top = fmaxf(top, __bfloat162float(piece.value[k]));
      teacher_top = fmaxf(teacher_top, __bfloat162float(other.value[k]));
    }
    float sum = 0.0f, teacher_sum = 0.0f, weighted = 0.0f;
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      const float m = __bfloat162float(piece.value[k]), t = __bfloat162float(other.value[k]);
      sum += __expf(m - top);
      const float e = __expf(t - teacher_top);
      teacher_sum += e;
      weighted = fmaf(e, t - m, weighted);
    }
    if (top != -INFINITY) {
      mine.sum = mine.sum * __expf(mine.top - top) + sum;
      mine.top = top;
    }
    if (teacher_top != -INFINITY) {
      const float shrink = __expf(of_teacher.log_sum.top - teacher_top);
      of_teacher.log_sum.sum = of_teacher.log_sum.sum * shrink + teacher_sum;
      of_teacher.weighted = of_teacher.weighted * shrink + weighted;
      of_teacher.log_sum.top = teacher_top;
    }
  }
  const LogSum total = block_log_sum<kThreads>(mine);
  const WeightedLogSum other_total = block_weighted_log_sum<kThreads>(of_teacher);
  const LogSum& teacher_total = other_total.log_sum;
  const float at_target = __bfloat162float(p.logits[blockIdx.x * p.vocab + target]);
  if (threadIdx.x == 0) {
    p.losses[blockIdx.x] = logf(total.sum) + (total.top - at_target);
    p.kl[blockIdx.x] = other_total.weighted / teacher_total.sum + (total.top - teacher_total.top) +
                       (logf(total.sum) - logf(teacher_total.sum));
  }
  __syncthreads();  // all threads have read the target's logit
  const float grad_scale = p.scale == nullptr ? p.grad_scale : p.grad_scale * *p.scale;
  const float scale = grad_scale / total.sum;
  const float teacher_scale = grad_scale * p.share / teacher_total.sum;
  const int64_t target_piece = target / kPiece;
  for (int64_t i = threadIdx.x; i < pieces; i += kThreads) {
    Piece<kPiece> piece = row[i];
    const Piece<kPiece> other = teacher[i];
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      float gradient = scale * __expf(__bfloat162float(piece.value[k]) - total.top) -
                       teacher_scale * __expf(__bfloat162float(other.value[k]) - teacher_total.top);
      if (i == target_piece && k == target % kPiece) gradient -= grad_scale * (1.0f - p.share);
      piece.value[k] = __float2bfloat16(gradient);
    }
    row[i] = piece;
  }
}

constexpr int kSumThreads = 512;

// sum += the losses of the tokens with a target.
struct LossSum {
  int64_t tokens = 0;
  const float* losses = nullptr;
  const float* kl = nullptr;  // or null
  const int32_t* targets = nullptr;
  CrossEntropySum* sum = nullptr;
};

// One block sums the losses, in an order that depends only on the number of tokens.
__global__ void __launch_bounds__(kSumThreads) loss_sum_kernel(LossSum p) {
  __shared__ double of_warp[kSumThreads / 32], kl_of_warp[kSumThreads / 32];
  __shared__ int64_t tokens_of_warp[kSumThreads / 32];
  double sum = 0.0, kl = 0.0;
  int64_t tokens = 0;
  for (int64_t m = threadIdx.x; m < p.tokens; m += kSumThreads) {
    if (p.targets[m] < 0) continue;
    sum += static_cast<double>(p.losses[m]);
    if (p.kl != nullptr) kl += static_cast<double>(p.kl[m]);
    ++tokens;
  }
  sum = warp_sum(sum);
  kl = warp_sum(kl);
  tokens = warp_sum(tokens);
  if (threadIdx.x % 32 == 0) {
    of_warp[threadIdx.x / 32] = sum;
    kl_of_warp[threadIdx.x / 32] = kl;
    tokens_of_warp[threadIdx.x / 32] = tokens;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kSumThreads / 32; ++warp) {
    sum += of_warp[warp];
    kl += kl_of_warp[warp];
    tokens += tokens_of_warp[warp];
  }
  p.sum->loss_sum += sum;
  p.sum->kl_sum += kl;
  p.sum->tokens += tokens;
}

constexpr int kLossThreads = 256;

__global__ void __launch_bounds__(kLossThreads) token_losses_kernel(TokenLossesCuda p) {
  const int32_t target = p.targets[blockIdx.x];
  if (target < 0) {
    if (threadIdx.x == 0) p.losses[blockIdx.x] = 0.0f;
    return;
  }
  const float* logits = p.logits + blockIdx.x * p.vocab;
  LogSum mine;
  for (int64_t i = threadIdx.x; i < p.vocab; i += kLossThreads) mine.add(logits[i], 1.0f);
  const LogSum total = block_log_sum<kLossThreads>(mine);
  if (threadIdx.x != 0) return;
  p.losses[blockIdx.x] = logf(total.sum) + (total.top - logits[target]);
}

cudaError_t launch_loss_sum(const LossSum& p, cudaStream_t stream) {
  loss_sum_kernel<<<1, kSumThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

// The logits of a chunk take at most 512 MiB: 4,096 tokens of a vocabulary of 49,152. Rewriting the
// weight gradient once per chunk then costs little beside its matrix product.
constexpr int64_t kMaxLogitBytes = int64_t{512} << 20;
constexpr int64_t kRowTile = 128;  // chunks are whole tiles of the matrix products

// The fewest chunks that fit, of equal size but for the last.
int64_t chunk_tokens(int64_t tokens, int64_t most) {
  const int64_t chunks = std::max<int64_t>(1, (tokens + most - 1) / most);
  const int64_t even = (tokens + chunks - 1) / chunks;
  return std::min(most, (even + kRowTile - 1) / kRowTile * kRowTile);
}

int64_t workspace_tokens(int64_t max_tokens, int64_t vocab) {
  const int64_t row = vocab * static_cast<int64_t>(sizeof(__nv_bfloat16));
  const int64_t most = std::max(kRowTile, kMaxLogitBytes / row / kRowTile * kRowTile);
  return std::min(max_tokens, chunk_tokens(max_tokens, most));
}

// Values of a chunk's logits, in whole 256 bytes.
int64_t chunk_logits(int64_t tokens, int64_t vocab) {
  return round_up(tokens * vocab, int64_t{128});
}

}  // namespace

cudaError_t launch_softmax_gradient(const SoftmaxGradient& p, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(p.tokens);
  if (p.teacher != nullptr) {
    if (!p.gradient || p.kl == nullptr) return cudaErrorInvalidValue;
    if (p.vocab % 8 == 0) {
      distillation_kernel<8><<<blocks, kThreads, 0, stream>>>(p);
    } else {
      distillation_kernel<1><<<blocks, kThreads, 0, stream>>>(p);
    }
    return cudaGetLastError();
  }
  if (p.vocab % 8 == 0) {
    softmax_gradient_kernel<8><<<blocks, kThreads, 0, stream>>>(p);
  } else {
    softmax_gradient_kernel<1><<<blocks, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

cudaError_t launch_token_losses(const TokenLossesCuda& p, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  token_losses_kernel<<<static_cast<unsigned>(p.tokens), kLossThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

CrossEntropyWorkspaceCuda::CrossEntropyWorkspaceCuda(int64_t max_tokens, int64_t vocab,
                                                     std::byte* memory, bool teacher)
    : vocab_(vocab),
      chunk_(workspace_tokens(max_tokens, vocab)),
      logits_(reinterpret_cast<__nv_bfloat16*>(memory)),
      teacher_logits_(teacher ? logits_ + chunk_logits(chunk_, vocab) : nullptr) {}

int64_t CrossEntropyWorkspaceCuda::bytes_needed(int64_t max_tokens, int64_t vocab, bool teacher) {
  return (teacher ? 2 : 1) * chunk_logits(workspace_tokens(max_tokens, vocab), vocab) *
         static_cast<int64_t>(sizeof(__nv_bfloat16));
}

void cross_entropy_cuda(CudaContext& ctx, const CrossEntropyCuda& problem,
                        const CrossEntropyWorkspaceCuda& workspace) {
  TWELL_CHECK(problem.vocab == workspace.vocab_, "cross-entropy: {} logits in a workspace for {}",
              problem.vocab, workspace.vocab_);
  TWELL_CHECK((problem.d_x == nullptr) == (problem.d_weight == nullptr),
              "cross-entropy needs both gradients or neither");
  __nv_bfloat16* const logits = workspace.logits_;
  const bool backward = problem.d_x != nullptr;
  const TeacherCuda& teacher = problem.teacher;
  TWELL_CHECK(teacher.x == nullptr || (backward && workspace.teacher_logits_ != nullptr),
              "distillation needs gradients and room for the teacher's logits");
  for (int64_t begin = 0; begin < problem.tokens; begin += workspace.chunk_) {
    const int64_t count = std::min(workspace.chunk_, problem.tokens - begin);
    const __nv_bfloat16* const x = problem.x + begin * problem.width;
    linear_cuda(ctx, {.rows = count,
                      .cols = problem.vocab,
                      .inner = problem.width,
                      .x = x,
                      .w = problem.weight,
                      .y = logits});
    if (teacher.x != nullptr) {
      linear_cuda(ctx, {.rows = count,
                        .cols = problem.vocab,
                        .inner = teacher.width,
                        .x = teacher.x + begin * teacher.width,
                        .w = teacher.weight,
                        .y = workspace.teacher_logits_});
    }
    const bool distills = teacher.x != nullptr;
    TWELL_CUDA_CHECK(
        launch_softmax_gradient({.tokens = count,
                                 .vocab = problem.vocab,
                                 .logits = logits,
                                 .targets = problem.targets + begin,
                                 .losses = problem.losses + begin,
                                 .gradient = backward,
                                 .grad_scale = problem.grad_scale,
                                 .scale = problem.scale,
                                 .teacher = distills ? workspace.teacher_logits_ : nullptr,
                                 .share = teacher.share,
                                 .kl = distills ? teacher.kl + begin : nullptr},
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
    TWELL_CUDA_CHECK(launch_loss_sum({.tokens = problem.tokens,
                                      .losses = problem.losses,
                                      .kl = teacher.x == nullptr ? nullptr : teacher.kl,
                                      .targets = problem.targets,
                                      .sum = problem.sum},
                                     ctx.stream()));
  }
}

}  // namespace twell
