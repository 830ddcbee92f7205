// SPDX-License-Identifier: Apache-2.0
// A warp makes a row of a screen, a block of columns at a time, two columns per lane.
#include "twell/base/reduce.cuh"
#include "twell/ops/decode/decode_layers.h"

namespace twell {
namespace {

constexpr int kScreenWarps = 8;

__device__ __forceinline__ int quantised(float weight, float scale) {
  const float steps = scale > 0.0f ? rintf(__fdiv_rn(weight, scale)) : 0.0f;
  constexpr auto kMost = static_cast<float>(kScreenMostWeight);
  return static_cast<int>(fminf(fmaxf(steps, -kMost), kMost));
}

__global__ void __launch_bounds__(kScreenWarps * 32) gate_screen_kernel(MakeGateScreen p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row = int64_t{blockIdx.x} * kScreenWarps + threadIdx.x / 32;
  if (row >= p.neurons) return;
  const auto* weights = reinterpret_cast<const __nv_bfloat162*>(p.weight + row * p.width);
  const auto* norms = reinterpret_cast<const __nv_bfloat162*>(p.norm);
  uint8_t* out = p.rows + row * screen_row_bytes(p.width);
  float off = 0.0f, all = 0.0f;  // this lane's share of |d n|^2, |w n|^2
  float largest = 0.0f;
  float taken = 0.0f;  // sum over blocks of (|s q|_1 max |n|)^2
  for (int64_t piece = 0; piece < p.width; piece += kScreenPiece) {
    const auto columns = static_cast<int>(min(int64_t{kScreenPiece}, p.width - piece));
    const int blocks = columns / kScreenBlock;
    auto* scales = reinterpret_cast<__nv_bfloat16*>(out + columns);
    for (int block = 0; block < blocks; ++block) {
      const int64_t at = (piece + block * kScreenBlock) / 2 + lane;
      const float2 w = __bfloat1622float2(weights[at]), n = __bfloat1622float2(norms[at]);
      const float most = warp_max(fmaxf(fabsf(w.x), fabsf(w.y)));
      const float most_norm = warp_max(fmaxf(fabsf(n.x), fabsf(n.y)));
      largest = fmaxf(largest, most);
      const __nv_bfloat16 stored =
          __float2bfloat16(__fdiv_rn(most, static_cast<float>(kScreenMostWeight)));
      const float scale = __bfloat162float(stored);
      const int qx = quantised(w.x, scale), qy = quantised(w.y, scale);
      reinterpret_cast<char2*>(out + block * kScreenBlock)[lane] =
          make_char2(static_cast<signed char>(qx), static_cast<signed char>(qy));
      if (lane == 0) scales[block] = stored;
      const float wx = scale * static_cast<float>(qx), wy = scale * static_cast<float>(qy);
      const float dx = (w.x - wx) * n.x, dy = (w.y - wy) * n.y;
      off = fmaf(dx, dx, fmaf(dy, dy, off));
      const float ax = w.x * n.x, ay = w.y * n.y;
      all = fmaf(ax, ax, fmaf(ay, ay, all));
      const float size = warp_sum(fabsf(wx) + fabsf(wy)) * most_norm;
      taken = fmaf(size, size, taken);
    }
    // Padding is written too, because TMA copies it.
    const int used = blocks * 2, padded = static_cast<int>(screen_piece_bytes(columns)) - columns;
    if (used + lane < padded) out[columns + used + lane] = 0;
    out += screen_piece_bytes(columns);
  }
  off = warp_sum(off);
  all = warp_sum(all);
  if (lane == 0) {
    p.errors[row] =
        screen_error(static_cast<float>(p.width), sqrtf(off), sqrtf(taken), sqrtf(all), largest);
  }
}

}  // namespace

cudaError_t launch_make_gate_screen(const MakeGateScreen& problem, cudaStream_t stream) {
  if (problem.neurons == 0) return cudaSuccess;
  const auto grid = static_cast<unsigned>((problem.neurons + kScreenWarps - 1) / kScreenWarps);
  gate_screen_kernel<<<grid, kScreenWarps * 32, 0, stream>>>(problem);
  return cudaGetLastError();
}

}  // namespace twell
