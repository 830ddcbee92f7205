// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/gate_gemm_cuda.h"

#include <algorithm>

#include "twell/base/rounding.h"
#include "twell/ops/ffn/hopper/gate_gemm_sm90.h"
#include "twell/ops/ffn/portable/gate_gemm_sm80.h"
#include "twell/sm90/tensor_map.h"

namespace twell {
namespace {

// Groups of 8 row tiles of 256 tokens by 8 weight tiles of 256 neurons are about what 66 clusters
// run at one time: 8 MiB of each, well within the L2.
constexpr int kGroup = 8;

struct Schedule {
  int m_pairs, n_tiles, whole;
  int clusters;  // clusters to launch

  Schedule(const CudaContext& ctx, int64_t tokens, int64_t ffn) {
    using namespace gate_gemm;
    m_pairs = static_cast<int>(ceil_div(tokens, kTileM * kCluster));
    n_tiles = static_cast<int>(ceil_div(ffn, kTileN));
    // If the last round has tiles for at most half of the clusters, they are cut in two and take
    // half as long.
    const int tiles = m_pairs * n_tiles, most = ctx.multiprocessors() / kCluster;
    const int rest = tiles % most;
    whole = 2 * rest <= most ? tiles - rest : tiles;
    clusters = std::min(most, whole + 2 * (tiles - whole));
  }
};

}  // namespace

std::string gate_gemm_unsupported(const CudaContext& ctx, const GateGemmCuda& problem) {
  if (ctx.compute_capability() != 90) {
    return fmt::format("needs a GPU of compute capability 9.0, {} is {}.{}", ctx.device_name(),
                       ctx.compute_capability() / 10, ctx.compute_capability() % 10);
  }
  if (problem.width % 8 != 0 || problem.ffn % 8 != 0 || problem.width <= 0 || problem.ffn <= 0) {
    return fmt::format("width {} and FFN size {} must be positive multiples of 8", problem.width,
                       problem.ffn);
  }
  const TwellShape& shape = problem.out.shape;
  if (shape.tile != gate_gemm::kTileN || shape.rows != problem.tokens ||
      shape.cols != problem.ffn) {
    return fmt::format("TwELL of [{}, {}] in tiles of {}, expected [{}, {}] in tiles of {}",
                       shape.rows, shape.cols, shape.tile, problem.tokens, problem.ffn,
                       gate_gemm::kTileN);
  }
  if (problem.out.spill_slots < shape.max_spill_slots()) {
    return fmt::format("{} spill slots, expected {}", problem.out.spill_slots,
                       shape.max_spill_slots());
  }
  // Rows and spill slots are 32-bit in the kernel.
  if (shape.max_spill_slots() > int64_t{1} << 31) {
    return fmt::format("{} tokens in {} tiles: at most 2^31 (row, tile) pairs per call",
                       problem.tokens, shape.tiles());
  }
  return {};
}

void gate_gemm_cuda(CudaContext& ctx, const GateGemmCuda& problem) {
  using namespace gate_gemm;
  const std::string unsupported = gate_gemm_unsupported(ctx, problem);
  TWELL_CHECK(unsupported.empty(), "gate GEMM: {}", unsupported);
  if (problem.tokens == 0) return;
  const Schedule schedule(ctx, problem.tokens, problem.ffn);
  Params params;
  params.map_x = sm90::matrix_tensor_map(problem.x, problem.tokens, problem.width, kTileM);
  params.map_x_half = sm90::matrix_tensor_map(problem.x, problem.tokens, problem.width, kTileM / 2);
  params.map_w =
      sm90::matrix_tensor_map(problem.w_gate, problem.ffn, problem.width, kTileN / kCluster);
  params.out = {problem.out.words,
                reinterpret_cast<uint32_t*>(problem.out.spill),
                problem.out.row_nnz,
                static_cast<int>(problem.tokens),
                static_cast<int>(problem.ffn),
                static_cast<int>(problem.out.shape.tiles()),
                problem.out.shape.slots()};
  params.k_steps = static_cast<int>(ceil_div(problem.width, kTileK));
  params.m_pairs = schedule.m_pairs;
  params.n_tiles = schedule.n_tiles;
  params.whole = schedule.whole;
  params.group = kGroup;
  params.condition = problem.condition;
  params.packed = problem.progress.words;
  TWELL_CUDA_CHECK(launch_gate_gemm_sm90(params, problem.progress.size,
                                         schedule.clusters * kCluster, ctx.stream()));
}

GatePhases gate_gemm_phases(const CudaContext& ctx, int64_t tokens, int64_t ffn) {
  using namespace gate_gemm;
  const Schedule schedule(ctx, tokens, ffn);
  GatePhases phases{schedule.clusters * kCluster, {}};
  // Units packed by the end of each phase; clusters take units by groups of tokens.
  const int per_group = kGroup * schedule.n_tiles;
  const int units[] = {schedule.whole - 2 * schedule.clusters, schedule.whole - schedule.clusters,
                       schedule.whole};
  static_assert(GateProgress::kPhases == 4);
  for (int phase = 0; phase < 3; ++phase) {
    const int groups = std::max(units[phase], 0) / per_group;
    phases.tokens[phase] =
        static_cast<int>(std::min<int64_t>(int64_t{groups} * kGroup * kTileM * kCluster, tokens));
  }
  if (schedule.whole == schedule.m_pairs * schedule.n_tiles) {
    phases.tokens[2] = static_cast<int>(tokens);
  }
  phases.tokens[3] = static_cast<int>(tokens);
  return phases;
}

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
  // TwELL words hold 32-bit spill slots, and a grid holds fewer than 2^31 output tiles.
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
