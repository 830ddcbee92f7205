// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/portable/gate_gemm_sm80_cuda.h"

#include "twell/ops/ffn/portable/gate_gemm_sm80.h"

namespace twell {

std::string gate_gemm_sm80_unsupported(const CudaContext& ctx, const GateGemmCuda& problem) {
  if (ctx.compute_capability() < 80) {
    return fmt::format("needs a GPU of compute capability 8.0 or later, {} is {}.{}",
                       ctx.device_name(), ctx.compute_capability() / 10,
                       ctx.compute_capability() % 10);
  }
  if (problem.width % 8 != 0 || problem.ffn % 8 != 0 || problem.width <= 0 || problem.ffn <= 0) {
    return fmt::format("width {} and FFN size {} must be positive multiples of 8", problem.width,
                       problem.ffn);
  }
  const TwellShape& shape = problem.out.shape;
  if (shape.tile != gate_gemm_sm80::kTileN || shape.slots() < 2 || shape.rows != problem.tokens ||
      shape.cols != problem.ffn) {
    return fmt::format("TwELL of [{}, {}] in tiles of {}, expected [{}, {}] in tiles of {}",
                       shape.rows, shape.cols, shape.tile, problem.tokens, problem.ffn,
                       gate_gemm_sm80::kTileN);
  }
  if (problem.out.spill_slots < shape.max_spill_slots()) {
    return fmt::format("{} spill slots, expected {}", problem.out.spill_slots,
                       shape.max_spill_slots());
  }
  // Spill slots are 32-bit in a word of TwELL, tiles of the output in a grid.
  if (shape.max_spill_slots() > int64_t{1} << 31 || problem.width > int64_t{1} << 30) {
    return fmt::format("{} tokens of width {} in {} tiles: at most 2^31 (row, tile) pairs per call",
                       problem.tokens, problem.width, shape.tiles());
  }
  return {};
}

void gate_gemm_sm80_cuda(CudaContext& ctx, const GateGemmCuda& problem) {
  using namespace gate_gemm_sm80;
  const std::string unsupported = gate_gemm_sm80_unsupported(ctx, problem);
  TWELL_CHECK(unsupported.empty(), "gate GEMM: {}", unsupported);
  if (problem.tokens == 0) return;
  TWELL_CUDA_CHECK(cudaMemsetAsync(
      problem.out.row_nnz, 0, static_cast<size_t>(problem.tokens) * sizeof(int32_t), ctx.stream()));
  const Params params{problem.x,
                      problem.w_gate,
                      problem.out.words,
                      reinterpret_cast<uint4*>(problem.out.spill),
                      problem.out.row_nnz,
                      static_cast<int>(problem.tokens),
                      static_cast<int>(problem.width),
                      static_cast<int>(problem.ffn),
                      static_cast<int>((problem.tokens + kTileM - 1) / kTileM),
                      static_cast<int>(problem.out.shape.tiles()),
                      problem.out.shape.slots()};
  TWELL_CUDA_CHECK(launch_gate_gemm_sm80(params, ctx.stream()));
}

}  // namespace twell
