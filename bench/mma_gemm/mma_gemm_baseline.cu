// SPDX-License-Identifier: Apache-2.0
// The dense GEMMs of a feed-forward layer as GPUs before Hopper run them: CUTLASS's kernels for
// compute capability 8.0 (mma.sync, cp.async), each tile that fits into 99 KiB of shared memory, on
// any GPU. What the portable executions are compared with, because cuBLASLt takes a newer GPU's own
// instructions there.
//   mma_gemm_baseline [--tokens M] [--width D] [--ffn F] [--rounds N]
// Prints per product and tile the best and the median of N timings in ms, and the sum of the best
// tiles of the three products of a layer and of the nine of training one, without what lies between
// them. A weight gradient is the product of two matrices over their rows, the tokens.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/epilogue/thread/linear_combination_relu.h"
#include "cutlass/gemm/device/gemm.h"

namespace {

using Element = cutlass::bfloat16_t;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

struct Operands {
  Element *a, *b, *c;
};

struct Result {
  double best, median;
};

template <typename Gemm, typename LayoutA, typename Layout>
bool time_gemm(int m, int n, int k, const Operands& operands, int rounds, Result& result) {
  constexpr bool kTransposed = std::is_same_v<Layout, ColumnMajor>;
  constexpr bool kOverRows = std::is_same_v<LayoutA, ColumnMajor>;
  typename Gemm::Arguments arguments({m, n, k}, {operands.a, kOverRows ? m : k},
                                     {operands.b, kTransposed ? k : n}, {operands.c, n},
                                     {operands.c, n}, {1.0f, 0.0f});
  Gemm gemm;
  if (gemm.initialize(arguments) != cutlass::Status::kSuccess) return false;
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int i = 0; i < rounds + 2; ++i) {
    check(cudaEventRecord(begin), "record");
    if (gemm() != cutlass::Status::kSuccess) return false;
    check(cudaEventRecord(end), "record");
    check(cudaEventSynchronize(end), "run");
    float ms = 0.0f;
    check(cudaEventElapsedTime(&ms, begin, end), "time");
    if (i >= 2) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  result = {times.front(), times[times.size() / 2]};
  return true;
}

template <typename LayoutA, typename Layout, int kM, int kN, int kK, int kWarpM, int kWarpN,
          int kStages>
void run_tile(const char* product, int m, int n, int k, const Operands& operands, int rounds,
              double& best) {
  using Gemm = cutlass::gemm::device::Gemm<
      Element, LayoutA, Element, Layout, Element, RowMajor, float, cutlass::arch::OpClassTensorOp,
      cutlass::arch::Sm80, cutlass::gemm::GemmShape<kM, kN, kK>,
      cutlass::gemm::GemmShape<kWarpM, kWarpN, kK>, cutlass::gemm::GemmShape<16, 8, 16>,
      cutlass::epilogue::thread::LinearCombination<
          Element, 8, float, float, cutlass::epilogue::thread::ScaleType::OnlyAlphaScaling>,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, kStages>;
  Result result{};
  if (!time_gemm<Gemm, LayoutA, Layout>(m, n, k, operands, rounds, result)) {
    std::printf("%-6s %3dx%3dx%2d %d stages: does not run\n", product, kM, kN, kK, kStages);
    return;
  }
  std::printf(
      "%-6s %3dx%3dx%2d, warps %2dx%2d, %d stages: %.4f ms best, %.4f median, %.0f TFLOP/s\n",
      product, kM, kN, kK, kWarpM, kWarpN, kStages, result.best, result.median,
      2e-9 * m * n * k / result.median);
  best = std::min(best, result.median);
}

template <typename Layout, typename LayoutA = RowMajor>
double best_tile(const char* product, int m, int n, int k, const Operands& operands, int rounds) {
  double best = 1e30;
  run_tile<LayoutA, Layout, 128, 256, 32, 64, 64, 3>(product, m, n, k, operands, rounds, best);
  run_tile<LayoutA, Layout, 128, 256, 32, 64, 64, 4>(product, m, n, k, operands, rounds, best);
  run_tile<LayoutA, Layout, 256, 128, 32, 64, 64, 3>(product, m, n, k, operands, rounds, best);
  run_tile<LayoutA, Layout, 256, 128, 32, 64, 64, 4>(product, m, n, k, operands, rounds, best);
  run_tile<LayoutA, Layout, 128, 128, 32, 64, 64, 3>(product, m, n, k, operands, rounds, best);
  run_tile<LayoutA, Layout, 128, 128, 64, 64, 64, 3>(product, m, n, k, operands, rounds, best);
  return best;
}

__global__ void fill(Element* values, int64_t count, float scale) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const auto bits = static_cast<uint32_t>(i * 2654435761u >> 3) % 2001u;
    values[i] = Element((static_cast<float>(bits) - 1000.0f) * 1e-3f * scale);
  }
}

Element* filled(int64_t count, float scale) {
  Element* values = nullptr;
  check(cudaMalloc(&values, static_cast<size_t>(count) * sizeof(Element)), "memory");
  fill<<<1024, 256>>>(values, count, scale);
  check(cudaDeviceSynchronize(), "fill");
  return values;
}

}  // namespace

int main(int argc, char** argv) {
  int m = 16384, d = 2048, f = 5632, rounds = 15;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    int* value = name == "--tokens"   ? &m
                 : name == "--width"  ? &d
                 : name == "--ffn"    ? &f
                 : name == "--rounds" ? &rounds
                                      : nullptr;
    if (value == nullptr) {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      return 2;
    }
    *value = std::atoi(argv[i + 1]);
  }
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "device");
  std::printf("%s, %d tokens, D %d, F %d\n", properties.name, m, d, f);
  Element* x = filled(int64_t{m} * d, 1.0f);
  Element* h = filled(int64_t{m} * f, 1.0f);
  Element* w = filled(int64_t{f} * d, 0.02f);
  Element* y = filled(std::max(int64_t{m}, int64_t{f}) * std::max(d, f), 1.0f);
  const double up = best_tile<ColumnMajor>("up", m, f, d, {x, w, y}, rounds);
  const double down = best_tile<RowMajor>("down", m, d, f, {h, w, y}, rounds);
  std::printf("gate, up and down by their best tiles: %.4f ms\n", 2.0 * up + down);
  const double weights = best_tile<RowMajor, ColumnMajor>("d_w", f, d, m, {h, x, y}, rounds);
  // Backward has one product like up, two like down, and three weight gradients.
  std::printf("the nine products of training: %.4f ms\n", 3.0 * up + 3.0 * down + 3.0 * weights);
  return 0;
}
