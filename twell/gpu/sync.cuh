// SPDX-License-Identifier: Apache-2.0
// Synchronisation that sm_80 and later have: named barriers, counters in global memory. Thin names
// over PTX, no policy.
#pragma once

#include <cstdint>

namespace twell::gpu {

// The 32-bit address in shared memory that PTX takes.
__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- named barriers ---
// Barrier among `threads` threads; id 0 is __syncthreads.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrives without waiting; `threads` counts those that wait too.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- counters in global memory ---
// 32-bit counters: a thread that acquires a value sees what was written before its release.
__device__ __forceinline__ void add_release(int32_t* counter, int32_t value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
__device__ __forceinline__ void add_release(uint32_t* counter, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
template <typename T>
__device__ __forceinline__ T load_acquire(const T* counter) {
  static_assert(sizeof(T) == 4);
  T value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
// The same for 64-bit words, and stores of words that one thread alone writes.
__device__ __forceinline__ int2 load_acquire(const int2* word) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return {static_cast<int>(value), static_cast<int>(value >> 32)};
}
// Releases if a __threadfence precedes it.
__device__ __forceinline__ void store_relaxed(int2* word, int2 value) {
  const uint64_t bits =
      uint64_t{static_cast<uint32_t>(value.y)} << 32 | static_cast<uint32_t>(value.x);
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(word), "l"(bits) : "memory");
}
__device__ __forceinline__ void store_release(int32_t* word, int32_t value) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

}  // namespace twell::gpu
