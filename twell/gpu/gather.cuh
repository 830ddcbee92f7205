// SPDX-License-Identifier: Apache-2.0
// 16-byte cp.async into shared memory, loads, and prefetches into the L2, of sm_80 and later. Thin
// names over PTX, no policy.
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

// Loads 16 bytes of what no kernel writes meanwhile and nobody reads twice, such as weights: they
// do not stay in the L1.
__device__ __forceinline__ uint4 load_once16(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// The sector around an address, as an ordinary load would read it.
__device__ __forceinline__ void prefetch_around(const void* src) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(src) : "memory");
}

}  // namespace twell::gpu
