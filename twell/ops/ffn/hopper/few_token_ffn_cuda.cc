// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/hopper/few_token_ffn_cuda.h"

#include <algorithm>

#include "twell/base/rounding.h"
#include "twell/ops/ffn/hopper/few_token_kernels.h"
#include "twell/sm90/tensor_map.h"

namespace twell {
namespace {

static_assert(kMaxFewTokens == few_token::kSplitTokens);

// Minimum rows per CTA for up to 8 tokens, because a product always has 16 rows.
constexpr int kLeastRows = 16;

}  // namespace

FewTokenWorkspace::FewTokenWorkspace(int64_t max_ffn)
    : max_ffn_(max_ffn),
      hidden_(max_ffn * kMaxFewTokens),
      fired_(max_ffn / kLeastRows + 1),
      arrived_(1) {
  TWELL_CUDA_CHECK(cudaMemset(fired_.data(), 0, static_cast<size_t>(fired_.bytes())));
  TWELL_CUDA_CHECK(cudaMemset(arrived_.data(), 0, static_cast<size_t>(arrived_.bytes())));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(nullptr));
}

std::string few_token_ffn_unsupported(const CudaContext& ctx, const FewTokenFfnCuda& problem) {
  if (ctx.compute_capability() != 90) {
    return fmt::format("needs a GPU of compute capability 9.0, {} is {}.{}", ctx.device_name(),
                       ctx.compute_capability() / 10, ctx.compute_capability() % 10);
  }
  if (problem.tokens < 0 || problem.tokens > kMaxFewTokens) {
    return fmt::format("{} tokens, at most {}", problem.tokens, kMaxFewTokens);
  }
  if (problem.width % 8 != 0 || problem.ffn % 8 != 0 || problem.width <= 0 || problem.ffn <= 0) {
    return fmt::format("width {} and FFN size {} must be positive multiples of 8", problem.width,
                       problem.ffn);
  }
  // The kernels index neurons and columns with 32 bits.
  constexpr int64_t kMost = int64_t{1} << 24;
  if (problem.width > kMost || problem.ffn > kMost) {
    return fmt::format("width {} and FFN size {}, at most {}", problem.width, problem.ffn, kMost);
  }
  return {};
}

void few_token_ffn_cuda(CudaContext& ctx, const FewTokenFfnCuda& problem,
                        FewTokenWorkspace& workspace) {
  const std::string unsupported = few_token_ffn_unsupported(ctx, problem);
  TWELL_CHECK(unsupported.empty(), "few-token FFN: {}", unsupported);
  TWELL_CHECK(problem.ffn <= workspace.max_ffn(),
              "few-token FFN: FFN size {} in a workspace for {}", problem.ffn, workspace.max_ffn());
  if (problem.tokens == 0) return;
  const bool gated = problem.w_gate != nullptr;
  const auto tokens = static_cast<int>(problem.tokens), width = static_cast<int>(problem.width),
             ffn = static_cast<int>(problem.ffn);
  TWELL_CHECK(tokens <= few_token::kRowTokens || problem.norm == nullptr,
              "few-token FFN: norm as part of {} tokens", tokens);
  const __nv_bfloat16* first = gated ? problem.w_gate : problem.w_up;
  const __nv_bfloat16* up = gated ? problem.w_up : nullptr;
  const few_token::Hidden hidden{workspace.hidden_.data(), workspace.fired_.data(),
                                 workspace.arrived_.data()};
  few_token::Down down{.hidden = hidden,
                       .weight = problem.w_down,
                       .residual = problem.residual,
                       .y = problem.y,
                       .tokens = tokens,
                       .width = width,
                       .ffn = ffn,
                       .word_neurons = few_token::kWordNeurons};
  if (tokens <= few_token::kRowTokens) {
    // The fewest rows at a time that give all CTAs the same number of passes.
    const int ctas = ctx.multiprocessors(), passes = ceil_div(ffn, ctas * few_token::kMaxRows);
    const int rows = std::max(ceil_div(ffn, ctas * passes), kLeastRows);
    TWELL_CUDA_CHECK(
        few_token::launch_row_gate_up_sm90({.x = problem.x,
                                            .norm = problem.norm,
                                            .first = first,
                                            .up = up,
                                            .down = problem.w_down,
                                            .hidden = hidden,
                                            .activity = problem.activity,
                                            .eps = problem.eps,
                                            .tokens = tokens,
                                            .width = width,
                                            .ffn = ffn,
                                            .rows = rows,
                                            .early_weights = problem.weights_are_constant},
                                           std::min(ctas, ceil_div(ffn, rows)), ctx.stream()));
    down.word_neurons = rows;
    TWELL_CUDA_CHECK(few_token::launch_row_down_sm90(down, ctx.stream()));
    return;
  }
  int& at_once = workspace.clusters_;
  if (at_once == 0) {
    TWELL_CUDA_CHECK(few_token::count_gate_up_clusters_sm90(&at_once));
    TWELL_CHECK(at_once > 0, "few-token FFN: {} runs no cluster of its CTAs", ctx.device_name());
  }
  // The fewest neurons at a time that give all clusters the same number of passes.
  const int passes = ceil_div(ffn, at_once * few_token::kMaxNeurons);
  const int neurons = ceil_div(ceil_div(ffn, at_once * passes), 64) * 64;
  const few_token::SplitGateUp params{
      .map_x = sm90::matrix_tensor_map(problem.x, tokens, width, few_token::kSplitTokens),
      .map_first = sm90::matrix_tensor_map(first, ffn, width, neurons / 2),
      .problem = {.up = up,
                  .down = problem.w_down,
                  .hidden = hidden,
                  .activity = problem.activity,
                  .tokens = tokens,
                  .width = width,
                  .ffn = ffn,
                  .early_weights = problem.weights_are_constant},
      .neurons = neurons,
      .slice_chunks = ceil_div(width, 4 * 64)};
  TWELL_CUDA_CHECK(few_token::launch_gate_up_sm90(params, std::min(at_once, ceil_div(ffn, neurons)),
                                                  ctx.stream()));
  TWELL_CUDA_CHECK(few_token::launch_split_down_sm90(down, ctx.stream()));
}

}  // namespace twell
