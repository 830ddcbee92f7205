// SPDX-License-Identifier: Apache-2.0
// Hopper synchronisation: mbarriers, proxy fences, thread block clusters and their distributed
// shared memory, registers. Thin names over PTX, no policy. Shared-memory addresses are 32-bit
// (smem_address).
// Source: PTX ISA, "Asynchronous barrier objects", "Async proxy", "mapa", "st.async".
#pragma once

#include <cstdint>

#include "twell/gpu/sync.cuh"

namespace twell::gpu {

// --- mbarrier ---
__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the other CTAs of the cluster and to the async proxy.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the barrier at the same offset in CTA `rank` of this cluster. Releases at CTA scope
// only, because cluster scope costs a full memory barrier. That suffices to hand back a slot that
// was read by WGMMA, if the arriving thread has waited for the WGMMA to complete.
__device__ __forceinline__ void barrier_arrive_cluster(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// Arrives, and announces `bytes` of bulk copies that complete on this barrier.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Announces bytes without arriving.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Waits until the phase of the given parity has completed.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "wait_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished_%=;\n"
      "bra wait_%=;\n"
      "finished_%=:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Whether the phase of the given parity has completed; does not wait.
__device__ __forceinline__ bool barrier_done(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// Position in a ring buffer of `Stages` stages; the parity flips with every round.
template <int Stages>
struct RingCursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// --- fences ---
// Orders ordinary writes to shared memory before later reads by WGMMA and TMA.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// The same for global memory.
__device__ __forceinline__ void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// --- clusters ---
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// The address in CTA `rank` that corresponds to `address` in this CTA.
__device__ __forceinline__ uint32_t remote_address(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
// Stores to another CTA's shared memory that complete bytes on a barrier of that CTA, which has to
// announce them. `to` (plus Offset) and `barrier` come from remote_address. With stores = false
// nothing is stored; this is a predicate, because the compiler waits for WGMMA before a branch.
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
// Orders no memory. That suffices to tell that this CTA has finished reading and, after
// fence_barrier_init, that its barriers are initialised.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// --- warps, registers ---
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
template <int Count>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

}  // namespace twell::gpu
