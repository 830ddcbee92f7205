// SPDX-License-Identifier: Apache-2.0
// How the CTAs of a cluster reach each other's shared memory: thin names over PTX, no policy.
// Source: PTX ISA, "mapa", "st.async", "barrier.cluster".
#pragma once

#include <cstdint>

namespace twell::sm90 {

// The address in CTA `rank` of what lies at `address` in this one.
__device__ __forceinline__ uint32_t remote_address(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
// Stores that complete bytes on a barrier of the CTA they go to, which announces them. Addresses
// are remote_address(...); Offset is added to `to`. stores = false does nothing, without a branch:
// the compiler does not let products of WGMMA run on across one.
template <int Offset>
__device__ __forceinline__ void store_remote16(uint32_t to, float a, float b, float c, float d,
                                               uint32_t barrier, bool stores) {
  asm volatile(
      "{\n.reg .pred stores;\nsetp.ne.b32 stores, %7, 0;\n"
      "@stores st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0 + %6], "
      "{%1, %2, %3, %4}, [%5];\n}\n" ::"r"(to),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier), "n"(Offset), "r"(static_cast<int>(stores))
      : "memory");
}
__device__ __forceinline__ void store_remote4(uint32_t to, uint32_t value, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to),
      "r"(value), "r"(barrier)
      : "memory");
}
// Without ordering of memory: enough to say that one is done reading, and, behind
// fence_barrier_init, that barriers are there.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// True in one thread of the warp; all of its threads call it.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(elected));
  return elected != 0;
}

}  // namespace twell::sm90
