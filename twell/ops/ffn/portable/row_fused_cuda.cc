// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/portable/row_fused_cuda.h"

#include "twell/ops/ffn/count_rows.h"
#include "twell/ops/ffn/portable/row_fused_kernels.h"
#include "twell/ops/ffn/problem_check_cuda.h"

namespace twell {
namespace {

constexpr int64_t kCounterWords = sizeof(row_fused::Counters) / sizeof(int32_t);

int64_t chunk_count(int64_t width) { return (width + row_fused::kChunk - 1) / row_fused::kChunk; }

}  // namespace

RowFusedWorkspace::RowFusedWorkspace(CudaContext& ctx, int64_t max_tokens, int64_t max_width)
    : max_tokens_(max_tokens),
      max_width_(max_width),
      heavy_rows_(max_tokens),
      counters_(kCounterWords + row_fused::kSplitTarget * chunk_count(max_width)),
      partials_(row_fused::kMaxPartials * max_width) {
  TWELL_CUDA_CHECK(
      cudaMemsetAsync(counters_.data(), 0, static_cast<size_t>(counters_.bytes()), ctx.stream()));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
}

std::string row_fused_unsupported(const CudaContext& ctx, const SparseUpDownCuda& problem) {
  if (ctx.compute_capability() < 80) {
    return fmt::format("needs a GPU of compute capability 8.0 or later, {} is {}.{}",
                       ctx.device_name(), ctx.compute_capability() / 10,
                       ctx.compute_capability() % 10);
  }
  if (std::string misshaped = sparse_up_down_misshaped(problem); !misshaped.empty()) {
    return misshaped;
  }
  constexpr int64_t kMost = int64_t{1} << 30;
  if (problem.tokens > kMost || problem.ffn > kMost || problem.width > int64_t{1} << 24) {
    return fmt::format("[{}, {}] with FFN size {} is too large for one call", problem.tokens,
                       problem.width, problem.ffn);
  }
  return {};
}

void row_fused_up_down_cuda(CudaContext& ctx, const SparseUpDownCuda& problem,
                            RowFusedWorkspace& workspace) {
  const std::string unsupported = row_fused_unsupported(ctx, problem);
  TWELL_CHECK(unsupported.empty(), "row-fused: {}", unsupported);
  TWELL_CHECK(problem.tokens <= workspace.max_tokens() && problem.width <= workspace.max_width(),
              "row-fused: [{}, {}] in a workspace for [{}, {}]", problem.tokens, problem.width,
              workspace.max_tokens(), workspace.max_width());
  if (problem.tokens == 0) return;
  const TwellPacked& packed = problem.gate;
  int32_t* counters = workspace.counters_.data();
  const row_fused::Problem kernels{packed.words,
                                   reinterpret_cast<const uint16_t*>(packed.spill),
                                   packed.row_nnz,
                                   problem.tokens,
                                   static_cast<int>(packed.shape.tiles()),
                                   packed.shape.slots(),
                                   problem.x,
                                   problem.w_up,
                                   problem.w_down,
                                   problem.y,
                                   static_cast<int>(problem.width),
                                   static_cast<int>(chunk_count(problem.width)),
                                   workspace.heavy_rows_.data(),
                                   reinterpret_cast<row_fused::Counters*>(counters),
                                   counters + kCounterWords,
                                   workspace.partials_.data(),
                                   problem.add};
  TWELL_CUDA_CHECK(row_fused::launch_light_rows(kernels, ctx.stream()));
  TWELL_CUDA_CHECK(row_fused::launch_heavy_rows(kernels, ctx.multiprocessors(), ctx.stream()));
  if (problem.activity != nullptr) {
    TWELL_CUDA_CHECK(
        launch_count_rows(packed.row_nnz, problem.tokens, problem.activity, ctx.stream()));
  }
}

}  // namespace twell
