// SPDX-License-Identifier: Apache-2.0
// Feed-forward layer for 9 to 64 tokens, in e4m3 for 1 to 64, as two kernels that run side by side.
//   gate_up     h of active neurons (small_gate_up_sm90.cu)
//   split_down  y = h w_down over active neurons (small_down_sm90.cu)
// Which neurons are active is published before h is ready, so split_down has loaded its weights by
// the time gate_up ends.
#include <algorithm>

#include "twell/base/rounding.h"
#include "twell/gpu/sm90/tensor_map.h"
#include "twell/ops/ffn/few_tokens/small_batch_sm90.cuh"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"

namespace twell::few_token {

namespace {

template <typename W>
struct Operands {
  const W *x, *gate, *up, *down;
};
template <typename W>
Operands<W> operands_of(const BatchFfnCuda& p) {
  if constexpr (sizeof(W) == 1) {
    return {p.x_bytes.values, p.gate_bytes.values, p.up_bytes.values, p.down_bytes.values};
  } else {
    return {p.x, p.w_gate, p.w_up, p.w_down};
  }
}

// Both kernels. clusters: as many as fit into the device at one time.
template <typename W>
cudaError_t launch_small_batch(const BatchFfnCuda& problem, const Hidden& hidden, int clusters,
                               cudaStream_t stream) {
  constexpr int kColumns = 128 / static_cast<int>(sizeof(W));  // of a row of a stage
  const Operands<W> of = operands_of<W>(problem);
  const bool gated = of.gate != nullptr;
  const auto tokens = static_cast<int>(problem.tokens), width = static_cast<int>(problem.width),
             ffn = static_cast<int>(problem.ffn);
  const auto map = [&](const W* matrix, int64_t rows, int32_t box_rows) {
    return sizeof(W) == 1 ? byte_matrix_tensor_map(matrix, rows, width, box_rows)
                          : matrix_tensor_map(matrix, rows, width, box_rows);
  };
  // The fewest neurons at a time that give all clusters the same number of passes.
  const int passes = ceil_div(ffn, clusters * kMaxNeurons);
  const int neurons = ceil_div(ceil_div(ffn, clusters * passes), 64) * 64;
  const SplitGateUp<W> params{
      .map_x = map(of.x, tokens, kSplitTokens),
      .map_first = map(gated ? of.gate : of.up, ffn, neurons / 2),
      .problem = {.up = gated ? of.up : nullptr,
                  .down = of.down,
                  .hidden = hidden,
                  .activity = problem.activity,
                  .tokens = tokens,
                  .width = width,
                  .ffn = ffn,
                  .early_weights = problem.weights_are_constant,
                  .squared = problem.squared,
                  .up_relu = problem.up_relu,
                  .cut = problem.cut,
                  .x_scales = problem.x_bytes.scales,
                  .first_scales = gated ? problem.gate_bytes.scales : problem.up_bytes.scales,
                  .up_scales = gated ? problem.up_bytes.scales : nullptr},
      .neurons = neurons,
      .slice_chunks = ceil_div(width, 4 * kColumns)};
  const cudaError_t status =
      launch_gate_up(params, std::min(clusters, ceil_div(ffn, neurons)), stream);
  if (status != cudaSuccess) return status;
  const DownOf<W> down{.hidden = hidden,
                       .weight = of.down,
                       .scales = problem.down_bytes.scales,
                       .residual = problem.add ? problem.y : nullptr,
                       .y = problem.y,
                       .tokens = tokens,
                       .width = width,
                       .ffn = ffn,
                       .word_neurons = kWordNeurons};
  return launch_split_down(down, stream);
}

// Lets both kernels take their shared memory, and counts the clusters that fit into the device.
template <typename W>
int prepare_small_batch(const CudaContext& ctx) {
  int clusters = 0;
  TWELL_CUDA_CHECK(prepare_gate_up<W>(&clusters));
  TWELL_CUDA_CHECK(prepare_split_down<W>());
  TWELL_CHECK(clusters > 0, "few-token FFN: {} runs no cluster of its CTAs", ctx.device_name());
  return clusters;
}

}  // namespace
}  // namespace twell::few_token

namespace twell {

void few_token_ffn_cuda(CudaContext& ctx, const BatchFfnCuda& problem,
                        FewTokenWorkspace& workspace) {
  check_ffn_call(ctx, problem.width, problem.ffn);
  TWELL_CHECK(problem.tokens <= kMaxFewTokens && problem.ffn <= workspace.max_ffn_,
              "few-token FFN: [{}, {}] in a workspace for [{}, {}]", problem.tokens, problem.ffn,
              kMaxFewTokens, workspace.max_ffn_);
  if (problem.tokens == 0) return;
  const bool bytes = !problem.x_bytes.empty();
  TWELL_CHECK((problem.tokens <= few_token::kRowTokens && !bytes) || problem.norm == nullptr,
              "few-token FFN: norm as part of {} tokens{}", problem.tokens,
              bytes ? " in e4m3" : "");
  TWELL_CHECK(!bytes || problem.width % 16 == 0,
              "few-token FFN: a width of {} in e4m3 is no multiple of 16", problem.width);
  const few_token::Hidden hidden{workspace.hidden_.data(), workspace.fired_.data(),
                                 workspace.arrived_.data()};
  // A kernel keeps its attributes, so they are set by the first call of a workspace alone.
  if (problem.tokens <= few_token::kRowTokens && !bytes) {
    if (!workspace.rows_prepared_) TWELL_CUDA_CHECK(few_token::prepare_decode_rows());
    workspace.rows_prepared_ = true;
    TWELL_CUDA_CHECK(
        few_token::launch_decode_rows(problem, hidden, ctx.multiprocessors(), ctx.stream()));
    return;
  }
  int& at_once = bytes ? workspace.byte_clusters_ : workspace.clusters_;
  if (at_once == 0) {
    at_once = bytes ? few_token::prepare_small_batch<uint8_t>(ctx)
                    : few_token::prepare_small_batch<__nv_bfloat16>(ctx);
  }
  const auto launch =
      bytes ? few_token::launch_small_batch<uint8_t> : few_token::launch_small_batch<__nv_bfloat16>;
  TWELL_CUDA_CHECK(launch(problem, hidden, at_once, ctx.stream()));
}

}  // namespace twell
