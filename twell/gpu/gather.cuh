// SPDX-License-Identifier: Apache-2.0
// 16-byte cp.async into shared memory, and prefetches into the L2, of sm_80 and later. Thin names
// over PTX, no policy.
#pragma once

#include <cstdint>

namespace twell::gpu {

// With valid = false reads nothing and writes zeros. Bypasses the L1, where the line would not be
// used again.
__device__ __forceinline__ void gather16(uint32_t dst, const void* src, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void gathers_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `Pending` of this thread's committed groups are pending.
template <int Pending>
__device__ __forceinline__ void gathers_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// The sector around an address, as an ordinary load would read it.
__device__ __forceinline__ void prefetch_around(const void* src) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(src) : "memory");
}

}  // namespace twell::gpu
