// SPDX-License-Identifier: Apache-2.0
#include "twell/train/device_update.h"

#include "twell/ops/adamw/split_weight.cuh"

namespace twell {
namespace {

constexpr int kThreads = 256;

// Equals normal() of rng.h.
__device__ float draw_normal(uint64_t seed, uint64_t stream, uint64_t index) {
  uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32);
  uint32_t c2 = static_cast<uint32_t>(stream), c3 = static_cast<uint32_t>(stream >> 32);
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const double u1 = (static_cast<double>(c0) + 1.0) * 0x1p-32;
  const double u2 = static_cast<double>(c1) * 0x1p-32;
  return static_cast<float>(sqrt(-2.0 * log(u1)) * cospi(2.0 * u2));
}

__global__ void __launch_bounds__(kThreads)
    split_kernel(const float* from, int64_t n, __nv_bfloat16* upper, int16_t* rest) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) split(from[i], upper[i], rest[i]);
}

__global__ void __launch_bounds__(kThreads)
    join_kernel(const __nv_bfloat16* upper, const int16_t* rest, int64_t n, float* to) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) to[i] = join(upper[i], rest[i]);
}

unsigned blocks_for(int64_t n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }

// One CTA per neuron.
__global__ void __launch_bounds__(kThreads) reinit_kernel(ReinitDead p) {
  const int64_t neuron = blockIdx.x;
  if (p.active[neuron] != 0 || isnan(*p.skip_unless_finite)) return;
  for (int64_t d = threadIdx.x; d < p.width; d += kThreads) {
    const int64_t at = neuron * p.width + d;
    const float noise = draw_normal(p.seed, p.stream, p.first_index + static_cast<uint64_t>(at));
    const float old = join(p.weight[at], p.weight_rest[at]);
    const float value = (1.0f - p.strength) * old + p.strength * p.std_dev * noise;
    split(value, p.weight[at], p.weight_rest[at]);
  }
}

}  // namespace

cudaError_t launch_split_weights(const float* from, int64_t n, __nv_bfloat16* upper, int16_t* rest,
                                 cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  split_kernel<<<blocks_for(n), kThreads, 0, stream>>>(from, n, upper, rest);
  return cudaGetLastError();
}

cudaError_t launch_join_weights(const __nv_bfloat16* upper, const int16_t* rest, int64_t n,
                                float* to, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  join_kernel<<<blocks_for(n), kThreads, 0, stream>>>(upper, rest, n, to);
  return cudaGetLastError();
}

cudaError_t launch_reinit_dead(const ReinitDead& p, cudaStream_t stream) {
  if (p.neurons == 0) return cudaSuccess;
  reinit_kernel<<<static_cast<unsigned>(p.neurons), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace twell
