// SPDX-License-Identifier: Apache-2.0
// Hopper's copies into and out of shared memory: TMA copies of tensor boxes and of contiguous
// bytes, which complete on an mbarrier; prefetches into the L2. Thin names over PTX, no policy.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "twell/gpu/gather.cuh"
#include "twell/gpu/sm90/barrier.cuh"

namespace twell::gpu {

// --- TMA: the box of a 2-D tensor map at (inner, outer) ---
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}
__device__ __forceinline__ void tensor_load(uint32_t dst, const CUtensorMap* map, int32_t inner,
                                            int32_t outer, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(dst),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(inner), "r"(outer), "r"(barrier)
      : "memory");
}
// Loads the box to the same offset in every CTA of the mask; each CTA's own barrier is signalled.
__device__ __forceinline__ void tensor_load_multicast(uint32_t dst, const CUtensorMap* map,
                                                      int32_t inner, int32_t outer,
                                                      uint32_t barrier, uint16_t cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(dst),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(inner), "r"(outer), "r"(barrier), "h"(cta_mask)
      : "memory");
}
// Stores a box from shared memory, without elements outside the matrix. Completes as bulk_store
// does.
__device__ __forceinline__ void tensor_store(const CUtensorMap* map, int32_t inner, int32_t outer,
                                             uint32_t src) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
          reinterpret_cast<uint64_t>(map)),
      "r"(inner), "r"(outer), "r"(src)
      : "memory");
}

// --- TMA: contiguous bytes, a multiple of 16, both addresses 16-byte aligned ---
__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void bulk_store(void* dst, uint32_t src, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until the sources of this thread's bulk stores may be overwritten.
__device__ __forceinline__ void bulk_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Waits until this thread's bulk stores are complete.
__device__ __forceinline__ void bulk_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// --- reductions ---
// Adds eight bf16 to those at `to`, 16-byte aligned, in the L2, so that nothing waits for the old
// values. Each sum is rounded to bf16.
__device__ __forceinline__ void reduce_add16(void* to, const uint4& values) {
  asm volatile("red.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(values.x),
               "r"(values.y), "r"(values.z), "r"(values.w)
               : "memory");
}

// --- 16-byte gathers (gather.cuh) ---
// Arrives at the barrier once all gathers that this thread has issued so far have landed. Gathers
// are ordinary writes: fence_async_shared has to stand between waiting on the barrier and WGMMA.
__device__ __forceinline__ void gather_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// --- prefetches into the L2 ---
// Contiguous bytes, a multiple of 16, by TMA.
__device__ __forceinline__ void bulk_prefetch(const void* src, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}

}  // namespace twell::gpu
