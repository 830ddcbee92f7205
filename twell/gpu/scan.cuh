// SPDX-License-Identifier: Apache-2.0
// Prefix sums over the threads of a warp or a CTA.
#pragma once

namespace twell::gpu {

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }

// Exclusive prefix sum over the lanes; total: over the warp.
__device__ __forceinline__ int warp_prefix(int value, int& total) {
  int through = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, through, step);
    if (lane_id() >= step) through += other;
  }
  total = __shfl_sync(~0u, through, 31);
  return through - value;
}

// Exclusive prefix sum over a CTA of Threads threads; `total` receives the sum. scratch: an int per
// warp in shared memory.
template <int Threads>
__device__ int block_scan(int value, int* scratch, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int through = value;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, through, step);
    if (lane >= step) through += other;
  }
  __syncthreads();
  if (lane == 31) scratch[warp] = through;
  __syncthreads();
  int sum = lane < Threads / 32 ? scratch[lane] : 0;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  total = __shfl_sync(~0u, sum, 31);
  const int before = __shfl_sync(~0u, sum, max(warp - 1, 0));
  return through - value + (warp > 0 ? before : 0);
}

}  // namespace twell::gpu
