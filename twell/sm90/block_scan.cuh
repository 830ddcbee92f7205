// SPDX-License-Identifier: Apache-2.0
// Prefix sums over the threads of a CTA.
#pragma once

namespace twell::sm90 {

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

}  // namespace twell::sm90
