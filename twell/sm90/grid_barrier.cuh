// SPDX-License-Identifier: Apache-2.0
// A barrier for all CTAs of a kernel that are resident together (a cooperative launch).
#pragma once

#include <cstdint>

#include "twell/sm90/barrier.cuh"

namespace twell::sm90 {

// What any thread wrote to global memory before wait() can be read by every thread after it, past
// the L1 cache. All kThreads first threads of all CTAs call wait() as often, and leave() at the
// end. Counters: two in device memory, 0 between kernels.
template <int kThreads>
class GridBarrier {
 public:
  __device__ explicit GridBarrier(uint32_t* counters) : arrived_(counters), left_(counters + 1) {}

  __device__ __forceinline__ void wait() {
    named_barrier(kNamed, kThreads);
    if (threadIdx.x == 0) {
      expected_ += gridDim.x;
      add_release(arrived_, 1u);
      while (load_acquire(arrived_) < expected_) {
      }
    }
    named_barrier(kNamed, kThreads);
  }

  // The last CTA makes the counters ready for the next kernel; true in one thread of it.
  __device__ __forceinline__ bool leave() {
    if (threadIdx.x != 0 || atomicAdd(left_, 1u) != gridDim.x - 1) return false;
    *arrived_ = 0;
    *left_ = 0;
    return true;
  }

 private:
  static constexpr int kNamed = 1;
  uint32_t *arrived_, *left_;
  uint32_t expected_ = 0;
};

}  // namespace twell::sm90
