// SPDX-License-Identifier: Apache-2.0
#include "tests/first_kernel/naive_ffn_cuda.h"

#include "twell/base/error.h"
#include "twell/ops/ffn/costs.h"
#include "twell/ops/ffn/ffn_call_cuda.h"

namespace twell::first_kernel {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// The dot product of a row of weights with x in shared memory, by a warp; the same in all lanes.
__device__ float dot(const float* x, const __nv_bfloat16* row, int width) {
  float sum = 0.0f;
  for (int d = static_cast<int>(threadIdx.x) % 32; d < width; d += 32) {
    sum = fmaf(x[d], __bfloat162float(row[d]), sum);
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  return sum;
}

__device__ float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

// A CTA per token. Shared memory: x [D] and h [F] in f32.
__global__ void __launch_bounds__(kThreads) naive_ffn_kernel(NaiveFfnCuda p) {
  extern __shared__ float shared[];
  __shared__ int active_of_warp[kWarps];
  float* const x = shared;
  float* const h = shared + p.width;
  const auto width = static_cast<int>(p.width), ffn = static_cast<int>(p.ffn);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int64_t token = blockIdx.x;
  for (int d = thread; d < width; d += kThreads) x[d] = __bfloat162float(p.x[token * width + d]);
  __syncthreads();

  int active = 0;
  for (int n = warp; n < ffn; n += kWarps) {
    const int64_t row = int64_t{n} * width;
    const float g = rounded(dot(x, p.w_gate + row, width));
    float value = 0.0f;
    if (!(g <= 0.0f)) {  // also for NaN
      value = rounded(g * dot(x, p.w_up + row, width));
      ++active;
    }
    if (thread % 32 == 0) h[n] = value;
  }
  if (thread % 32 == 0) active_of_warp[warp] = active;
  __syncthreads();

  for (int d = thread; d < width; d += kThreads) {
    float sum = 0.0f;
    for (int n = 0; n < ffn; ++n) {
      if (h[n] != 0.0f) sum = fmaf(h[n], __bfloat162float(p.w_down[int64_t{n} * width + d]), sum);
    }
    __nv_bfloat16* const y = p.y + token * width + d;
    *y = __float2bfloat16_rn(p.add ? rounded(sum) + __bfloat162float(*y) : sum);
  }
  if (thread == 0 && p.activity != nullptr) {
    int total = 0;
    for (const int count : active_of_warp) total += count;
    atomicAdd(&p.activity->tokens, 1ull);
    atomicAdd(&p.activity->nnz, static_cast<unsigned long long>(total));
  }
}

}  // namespace

void naive_ffn_cuda(CudaContext& ctx, const NaiveFfnCuda& problem) {
  TWELL_CHECK(problem.width % 8 == 0 && problem.width <= kMostWidth && problem.ffn % 8 == 0 &&
                  problem.ffn <= kMostFfn,
              "naive FFN: width {} and FFN size {} are multiples of 8 up to {} and {}",
              problem.width, problem.ffn, kMostWidth, kMostFfn);
  if (problem.tokens == 0) return;
  const auto bytes = static_cast<uint32_t>((problem.width + problem.ffn) * sizeof(float));
  naive_ffn_kernel<<<static_cast<unsigned>(problem.tokens), kThreads, bytes, ctx.stream()>>>(
      problem);
  TWELL_CUDA_CHECK_LAUNCH("naive_ffn_kernel");
}

// Every token reads all of w_gate from the L2, and its neurons' rows of w_up and w_down.
double naive_cost(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity) {
  constexpr double kLaunch = 5.0, kBytesPerMicrosecond = 5e6;
  const double rows = static_cast<double>(layer.ffn) + 2.0 * activity.nnz_per_token;
  return kLaunch + static_cast<double>(tokens) * rows * 2.0 * static_cast<double>(layer.width) /
                       kBytesPerMicrosecond;
}

void launch_naive(const FfnCallCuda& call) {
  const FfnForwardCuda& problem = call.problem;
  naive_ffn_cuda(call.ctx, {.tokens = problem.tokens,
                            .width = call.width(),
                            .ffn = call.ffn(),
                            .x = problem.x,
                            .w_gate = problem.weights.w_gate,
                            .w_up = problem.weights.w_up,
                            .w_down = problem.weights.w_down,
                            .y = problem.y,
                            .add = problem.add,
                            .activity = call.plan.counts});
}

GpuFfnExecution naive_execution() {
  return {.name = "naive",
          .limits = {.least_capability = 80,
                     .most_capability = 999,
                     .activations = activation_set(Activation::kRelu),
                     .most_width = kMostWidth,
                     .most_ffn = kMostFfn},
          .cost = naive_cost,
          .needed_share = ffn_costs::sparse_share,
          .launch = launch_naive};
}

}  // namespace twell::first_kernel
