// SPDX-License-Identifier: Apache-2.0
// Feed-forward layer for 9 to 64 tokens, as two kernels that run side by side.
//
// 1. gate_up: a cluster of four CTAs computes the gate of up to 192 neurons and h of the active
// ones. Each CTA has a quarter of the width and keeps its slice of x in shared memory for both
// products; tokens are the 64-row operand of WGMMA.
//   gate: TMA loads rows of the first weight into a ring buffer; partial sums go to the CTA that
//         owns their tokens; the set of active neurons goes to all four CTAs
//   up:   slices of active rows of w_up are gathered into the same ring buffer; partial sums as
//         before; h = gate * up
// Rows of w_down of active neurons are prefetched into the L2 for the next kernel. Each launch runs
// its code once, so instruction fetches matter: loops are unrolled only where it pays.
//
// 2. split_down: y = h w_down over active neurons. A cluster of four CTAs computes 64 columns of y:
// each CTA takes a quarter of the active neurons, gathers 128 bytes of each one's row and its row
// of h into a ring buffer, and multiplies on WGMMA, tokens as the 64-row operand; then each adds up
// 16 tokens. Which neurons are active is published before h is ready, so the weights are loaded by
// the time gate_up ends.
#include <algorithm>

#include "twell/base/rounding.h"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/sm90/barrier.cuh"
#include "twell/gpu/sm90/copy.cuh"
#include "twell/gpu/sm90/tensor_map.h"
#include "twell/gpu/sm90/wgmma.cuh"
#include "twell/gpu/warp_mma.cuh"
#include "twell/ops/ffn/few_tokens/few_token_sm90.cuh"
#include "twell/ops/ffn/few_tokens/small_down_sm90.cuh"
#include "twell/ops/ffn/few_tokens/small_gate_up_sm90.cuh"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"

namespace twell::few_token {

namespace {

// Both kernels. clusters: as many as fit into the device at one time.
cudaError_t launch_small_batch(const BatchFfnCuda& problem, const Hidden& hidden, int clusters,
                               cudaStream_t stream) {
  const bool gated = problem.w_gate != nullptr;
  const auto tokens = static_cast<int>(problem.tokens), width = static_cast<int>(problem.width),
             ffn = static_cast<int>(problem.ffn);
  // The fewest neurons at a time that give all clusters the same number of passes.
  const int passes = ceil_div(ffn, clusters * kMaxNeurons);
  const int neurons = ceil_div(ceil_div(ffn, clusters * passes), 64) * 64;
  const SplitGateUp params{.map_x = matrix_tensor_map(problem.x, tokens, width, kSplitTokens),
                           .map_first = matrix_tensor_map(gated ? problem.w_gate : problem.w_up,
                                                          ffn, width, neurons / 2),
                           .problem = {.up = gated ? problem.w_up : nullptr,
                                       .down = problem.w_down,
                                       .hidden = hidden,
                                       .activity = problem.activity,
                                       .tokens = tokens,
                                       .width = width,
                                       .ffn = ffn,
                                       .early_weights = problem.weights_are_constant,
                                       .squared = problem.squared,
                                       .up_relu = problem.up_relu,
                                       .cut = problem.cut},
                           .neurons = neurons,
                           .slice_chunks = ceil_div(width, 4 * 64)};
  const cudaError_t status =
      gate_up::launch(params, std::min(clusters, ceil_div(ffn, neurons)), stream);
  if (status != cudaSuccess) return status;
  return split_down::launch({.hidden = hidden,
                             .weight = problem.w_down,
                             .residual = problem.add ? problem.y : nullptr,
                             .y = problem.y,
                             .tokens = tokens,
                             .width = width,
                             .ffn = ffn,
                             .word_neurons = kWordNeurons},
                            stream);
}

}  // namespace
}  // namespace twell::few_token

namespace twell {

FewTokenWorkspace::FewTokenWorkspace(int64_t max_ffn, int64_t max_width)
    : max_ffn_(max_ffn),
      hidden_(max_ffn * kMaxFewTokens),
      fired_(max_ffn / few_token::kLeastRows + 1),
      arrived_(1),
      parts_(kMaxStreams * few_token::kRowTokens * std::min(max_width, kMaxStreamWidth)) {
  TWELL_CUDA_CHECK(cudaMemset(fired_.data(), 0, static_cast<size_t>(fired_.bytes())));
  TWELL_CUDA_CHECK(cudaMemset(arrived_.data(), 0, static_cast<size_t>(arrived_.bytes())));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(nullptr));
}

void few_token_ffn_cuda(CudaContext& ctx, const BatchFfnCuda& problem,
                        FewTokenWorkspace& workspace) {
  check_ffn_call(ctx, problem.width, problem.ffn);
  TWELL_CHECK(problem.tokens <= kMaxFewTokens && problem.ffn <= workspace.max_ffn_,
              "few-token FFN: [{}, {}] in a workspace for [{}, {}]", problem.tokens, problem.ffn,
              kMaxFewTokens, workspace.max_ffn_);
  if (problem.tokens == 0) return;
  TWELL_CHECK(problem.tokens <= few_token::kRowTokens || problem.norm == nullptr,
              "few-token FFN: norm as part of {} tokens", problem.tokens);
  const few_token::Hidden hidden{workspace.hidden_.data(), workspace.fired_.data(),
                                 workspace.arrived_.data()};
  // A kernel keeps its attributes, so they are set by the first call of a workspace alone.
  if (problem.tokens <= few_token::kRowTokens) {
    if (!workspace.rows_prepared_) TWELL_CUDA_CHECK(few_token::prepare_decode_rows());
    workspace.rows_prepared_ = true;
    TWELL_CUDA_CHECK(
        few_token::launch_decode_rows(problem, hidden, ctx.multiprocessors(), ctx.stream()));
    return;
  }
  int& at_once = workspace.clusters_;
  if (at_once == 0) {
    TWELL_CUDA_CHECK(few_token::gate_up::count_clusters(&at_once));
    TWELL_CUDA_CHECK(few_token::allow_shared_memory(few_token::split_down::split_down_sm90_kernel,
                                                    few_token::split_down::kBytes));
    TWELL_CHECK(at_once > 0, "few-token FFN: {} runs no cluster of its CTAs", ctx.device_name());
  }
  TWELL_CUDA_CHECK(few_token::launch_small_batch(problem, hidden, at_once, ctx.stream()));
}

}  // namespace twell
