// SPDX-License-Identifier: Apache-2.0
// Which neurons fire is known well before h is, so that `down` can have the rows of w_down there
// when the gate kernel ends. It looks for words that the gate kernel, beside which it runs, writes
// one after another. A word is a mask of neurons and a bit that announces it; the last CTA of
// `down` that has read them all clears them for the next call, which cannot write its own before
// this one has ended. Looking is a matter of time only: what is not there yet is read when the gate
// kernel has ended.
#pragma once

#include <cstdint>

namespace twell::few_token {

inline constexpr uint64_t kFiredKnown = uint64_t{1} << 63;

__device__ __forceinline__ uint64_t load_fired(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void store_fired(uint64_t* word, uint64_t mask) {
  const uint64_t value = mask | kFiredKnown;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ bool is_known(uint64_t word) { return (word & kFiredKnown) != 0; }

// Waits for the word some 100 us at most, after which it may still be missing. Unrolled is 19 KB of
// code, which next to the gate kernel from 9 tokens on does not fit into the instruction cache; not
// unrolled, the kernel for up to 8 tokens spills.
template <bool Unrolled>
__device__ __forceinline__ uint64_t await_fired(const uint64_t* word) {
  constexpr int kRounds = 200;
  uint64_t value = load_fired(word);
  if constexpr (Unrolled) {
    for (int i = 0; i < kRounds && !is_known(value); ++i) {
      __nanosleep(100);
      value = load_fired(word);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < kRounds && !is_known(value); ++i) {
      __nanosleep(100);
      value = load_fired(word);
    }
  }
  return value;
}

// This CTA has read all words. True in the last one, which is to clear them.
__device__ __forceinline__ bool last_to_read(uint32_t* arrived) {
  return atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
}
// A warp; `last` of its first lane counts.
__device__ __forceinline__ void clear_if_last(bool last, uint64_t* fired, int words) {
  if (__shfl_sync(~0u, static_cast<int>(last), 0) == 0) return;
  for (int word = static_cast<int>(threadIdx.x) % 32; word < words; word += 32) fired[word] = 0;
}

}  // namespace twell::few_token
