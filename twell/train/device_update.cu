// SPDX-License-Identifier: Apache-2.0
#include "twell/train/device_update.h"

#include "twell/base/for_each.cuh"
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

struct Split {
  const float* from;
  __nv_bfloat16* upper;
  int16_t* rest;
  __device__ void operator()(int64_t i) const {
    int16_t lower;
    split(from[i], upper[i], lower);
    if (rest != nullptr) rest[i] = lower;
  }
};

struct Join {
  const __nv_bfloat16* upper;
  const int16_t* rest;
  float* to;
  __device__ void operator()(int64_t i) const { to[i] = join(upper[i], rest[i]); }
};

// One CTA per neuron.
__global__ void __launch_bounds__(kThreads) reinit_kernel(ReinitDead p) {
  const int64_t neuron = blockIdx.x;
  if (p.active[neuron] != 0 || isnan(*p.skip_unless_finite)) return;
  for (int64_t d = threadIdx.x; d < p.width; d += kThreads) {
    const int64_t at = neuron * p.width + d;
    if (at < p.begin || at >= p.end) continue;
    int16_t& rest = p.weight_rest[at - p.begin];
    const float noise = draw_normal(p.seed, p.stream, p.first_index + static_cast<uint64_t>(at));
    const float old = join(p.weight[at], rest);
    const float value = (1.0f - p.strength) * old + p.strength * p.std_dev * noise;
    split(value, p.weight[at], rest);
  }
}

struct Round {
  const float* from;
  __nv_bfloat16* to;
  __device__ void operator()(int64_t i) const { to[i] = __float2bfloat16_rn(from[i]); }
};

struct AddParts {
  const __nv_bfloat16* parts;
  int64_t ranks, own, n;
  float* sum;
  __device__ void operator()(int64_t i) const {
    float total = 0.0f;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      total += rank == own ? sum[i] : __bfloat162float(parts[rank * n + i]);
    }
    sum[i] = total;
  }
};

struct SumSquares {
  const GradientNorm* norms;
  int64_t count;
  double* squares;
  __device__ void operator()(int64_t) const {
    double sum = 0.0;
    for (int64_t i = 0; i < count; ++i) sum += norms[i].norm * norms[i].norm;
    *squares = sum;
  }
};

struct NormOfRanks {
  const double* squares;
  int64_t ranks;
  double clip_norm;
  GradientNorm* result;
  __device__ void operator()(int64_t) const {
    double sum = 0.0;
    for (int64_t i = 0; i < ranks; ++i) sum += squares[i];
    GradientNorm out;
    out.norm = sqrt(sum);
    if (!isfinite(out.norm)) {
      out.clip_factor = nanf("");
    } else if (clip_norm > 0.0 && out.norm > clip_norm) {
      out.clip_factor = static_cast<float>(clip_norm / out.norm);
    }
    *result = out;
  }
};

}  // namespace

cudaError_t launch_split_weights(const float* from, int64_t n, __nv_bfloat16* upper, int16_t* rest,
                                 cudaStream_t stream) {
  return launch_for_each(n, Split{from, upper, rest}, stream);
}

cudaError_t launch_join_weights(const __nv_bfloat16* upper, const int16_t* rest, int64_t n,
                                float* to, cudaStream_t stream) {
  return launch_for_each(n, Join{upper, rest, to}, stream);
}

cudaError_t launch_reinit_dead(const ReinitDead& p, cudaStream_t stream) {
  if (p.neurons == 0) return cudaSuccess;
  reinit_kernel<<<static_cast<unsigned>(p.neurons), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_sum_squares(const GradientNorm* norms, int64_t count, double* squares,
                               cudaStream_t stream) {
  return launch_for_each(1, SumSquares{norms, count, squares}, stream);
}

cudaError_t launch_norm_of_ranks(const double* squares, int64_t ranks, double clip_norm,
                                 GradientNorm* result, cudaStream_t stream) {
  return launch_for_each(1, NormOfRanks{squares, ranks, clip_norm, result}, stream);
}

cudaError_t launch_round_gradients(const float* from, int64_t n, __nv_bfloat16* to,
                                   cudaStream_t stream) {
  return launch_for_each(n, Round{from, to}, stream);
}

cudaError_t launch_add_parts(const __nv_bfloat16* parts, int64_t ranks, int64_t own, int64_t n,
                             float* sum, cudaStream_t stream) {
  return launch_for_each(n, AddParts{parts, ranks, own, n, sum}, stream);
}

}  // namespace twell
