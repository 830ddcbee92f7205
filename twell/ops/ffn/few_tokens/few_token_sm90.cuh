// SPDX-License-Identifier: Apache-2.0
// What the kernels for decode rows (1 to 8 tokens) and small batches (9 to 64) share: what the gate
// kernel passes to the `down` kernel that runs beside it.
#pragma once

#include <cstdint>

#include "twell/ops/ffn/few_tokens/batch_ffn_cuda.h"

namespace twell::few_token {

// What the first kernel passes to the second. All words and `arrived` are 0 between calls.
struct Hidden {
  __nv_bfloat16* h;   // [F, 8 or 64], written for active neurons; 0 past the tokens
  uint64_t* fired;    // [ceil(F / n)] n neurons per word from bit 0 on
  uint32_t* arrived;  // CTAs that have read all words
};

template <typename W>
struct DownOf {
  Hidden hidden;
  const W* weight;                // [F, D]
  const float* scales;            // [D] of the columns of an e4m3 weight
  const __nv_bfloat16* residual;  // [M, D], may be y; or null
  __nv_bfloat16* y;               // [M, D]
  int tokens, width, ffn;
  int word_neurons;  // neurons per word of hidden.fired
};
using Down = DownOf<__nv_bfloat16>;

// Allows a kernel this much dynamic shared memory, of an L1 cache that is shared memory as far as
// possible, so that CTAs of the next kernel fit beside its own.
template <typename Kernel>
cudaError_t allow_shared_memory(Kernel* kernel, int bytes) {
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
}

// Once per device, before the first launch: lets the kernels of decode rows take their shared
// memory.
cudaError_t prepare_decode_rows();
// Both kernels of decode rows, for at most kRowTokens tokens. ctas: one per SM.
cudaError_t launch_decode_rows(const BatchFfnCuda& problem, const Hidden& hidden, int ctas,
                               cudaStream_t stream);

// Words in which a gate kernel publishes its active neurons to the `down` kernel that runs beside
// it. They are known well before h, so `down` has loaded its rows of w_down by the time the gate
// kernel ends. A word is a mask of neurons and a valid bit. The last CTA of `down` to read all
// words clears them for the next call, whose gate kernel cannot write before this call has ended.
// Polling only saves time: words not yet valid are read after the gate kernel has ended.
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

// Polls the word for at most about 100 us; it may still be invalid then. Unrolled, the loop is 19
// KB of code, which does not fit into the instruction cache beside the gate kernel of 9 or more
// tokens; not unrolled, the kernel for up to 8 tokens spills registers.
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

// Signals that this CTA has read all words. True in the last CTA, which has to clear them.
__device__ __forceinline__ bool last_to_read(uint32_t* arrived) {
  return atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
}
// Called by a warp; only the first lane's `last` counts.
__device__ __forceinline__ void clear_if_last(bool last, uint64_t* fired, int words) {
  if (__shfl_sync(~0u, static_cast<int>(last), 0) == 0) return;
  for (int word = static_cast<int>(threadIdx.x) % 32; word < words; word += 32) fired[word] = 0;
}

}  // namespace twell::few_token
