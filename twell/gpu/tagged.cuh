// SPDX-License-Identifier: Apache-2.0
// Values that CTAs of one kernel exchange through global memory, each with a tag in the same 64-bit
// word. A CTA that reads the tag it waits for has the value too, after one round trip to the L2 and
// without a barrier or a fence. Orders no other memory. CTAs that wait for each other have to be
// resident together (a cooperative launch).
#pragma once

#include <cstdint>

namespace twell::gpu {

using Tagged = uint64_t;  // value in the lower half, tag in the upper one

__device__ __forceinline__ Tagged tagged(uint32_t value, uint32_t tag) {
  return uint64_t{tag} << 32 | value;
}
__device__ __forceinline__ void store_tagged(Tagged* to, uint32_t value, uint32_t tag) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(tagged(value, tag)) : "memory");
}
// Stores two words at a 16-byte aligned address; each word is written at once, the pair need not
// be.
__device__ __forceinline__ void store_tagged(Tagged* to, uint32_t first, uint32_t second,
                                             uint32_t tag) {
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(tagged(first, tag)),
               "l"(tagged(second, tag))
               : "memory");
}

struct TaggedPair {
  Tagged first, second;
};
__device__ __forceinline__ Tagged load_tagged(const Tagged* from) {
  Tagged v;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ TaggedPair load_tagged_pair(const Tagged* from) {
  TaggedPair v;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(v.first), "=l"(v.second)
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ bool has_tag(Tagged seen, uint32_t tag) {
  return static_cast<uint32_t>(seen >> 32) == tag;
}
__device__ __forceinline__ bool has_tag(const TaggedPair& seen, uint32_t tag) {
  return has_tag(seen.first, tag) && has_tag(seen.second, tag);
}
__device__ __forceinline__ uint2 values(const TaggedPair& seen) {
  return {static_cast<uint32_t>(seen.first), static_cast<uint32_t>(seen.second)};
}

// Waits for the tag and returns the value; `seen` is what was last loaded from there.
__device__ __forceinline__ uint32_t wait_tagged(Tagged seen, const Tagged* from, uint32_t tag) {
  while (!has_tag(seen, tag)) seen = load_tagged(from);
  return static_cast<uint32_t>(seen);
}
__device__ __forceinline__ uint2 wait_tagged(TaggedPair seen, const Tagged* from, uint32_t tag) {
  while (!has_tag(seen, tag)) seen = load_tagged_pair(from);
  return values(seen);
}
// Waits until load(i) returns the tag for every wanted i. All words that are missing are loaded
// again together, so that they share a round trip to the L2.
template <typename Seen, int kMost, typename Wanted, typename Load>
__device__ __forceinline__ void wait_all_tagged(Seen (&seen)[kMost], const Wanted& wanted,
                                                const Load& load, uint32_t tag) {
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    // Without a value for every i, these registers would be taken all through a loop around this.
    seen[i] = Seen{};
    if (wanted(i)) seen[i] = load(i);
  }
  while (true) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kMost; ++i) all = all && (!wanted(i) || has_tag(seen[i], tag));
    if (all) return;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (wanted(i) && !has_tag(seen[i], tag)) seen[i] = load(i);
    }
  }
}
// Waits for `count` pairs, at from(i).
template <int kMost, typename From>
__device__ __forceinline__ void wait_tagged(TaggedPair (&seen)[kMost], int count, const From& from,
                                            uint32_t tag) {
  wait_all_tagged(
      seen, [&](int i) { return i < count; }, [&](int i) { return load_tagged_pair(from(i)); },
      tag);
}

}  // namespace twell::gpu
