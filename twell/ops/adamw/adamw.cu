// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/adamw/adamw_cuda.h"

#include "twell/base/reduce.cuh"

namespace twell {
namespace {

constexpr int kAdamWThreads = 256;
constexpr int kVector = 4;                           // values per thread: one 16-byte access of f32
constexpr int64_t kBlock = kAdamWThreads * kVector;  // values of a block

struct alignas(8) Bf16Vector {
  __nv_bfloat16 value[kVector];
};
struct alignas(8) RestVector {
  int16_t value[kVector];
};

__device__ void load(const float* from, float* values) {
  const float4 v = *reinterpret_cast<const float4*>(from);
  values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
}
__device__ void store(const float* values, float* to) {
  *reinterpret_cast<float4*>(to) = {values[0], values[1], values[2], values[3]};
}
__device__ void load(const __nv_bfloat16* from, float* values) {
  const auto v = *reinterpret_cast<const Bf16Vector*>(from);
#pragma unroll
  for (int k = 0; k < kVector; ++k) values[k] = __bfloat162float(v.value[k]);
}
__device__ void store(const float* values, __nv_bfloat16* to) {
  Bf16Vector v;
#pragma unroll
  for (int k = 0; k < kVector; ++k) v.value[k] = __float2bfloat16(values[k]);
  *reinterpret_cast<Bf16Vector*>(to) = v;
}
__device__ float as_float(float value) { return value; }
__device__ float as_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ void assign(float& to, float value) { to = value; }
__device__ void assign(__nv_bfloat16& to, float value) { to = __float2bfloat16(value); }

// One parameter, in the order of operations of the CPU op.
__device__ void update(const AdamWCoefficients& c, float decay, float scaled_grad, float& w,
                       float& m, float& v) {
  m = fmaf(c.one_minus_beta1, __fsub_rn(scaled_grad, m), m);
  v = fmaf(__fmul_rn(c.one_minus_beta2, scaled_grad), scaled_grad, __fmul_rn(v, c.beta2));
  const float denominator = fmaf(__fsqrt_rn(v), c.rsqrt_correct2, c.eps);
  w = fmaf(-c.step_size, __fdiv_rn(m, denominator), __fmul_rn(w, decay));
}

// Rounds both moments of the parameter `lane` of a group to bf16.
__device__ void round_moments(const PhiloxBits& bits, int64_t lane, float& m, float& v) {
  const uint32_t random = bits.word[lane];
  m = __uint_as_float(round_stochastically(__float_as_uint(m), random));
  v = __uint_as_float(round_stochastically(__float_as_uint(v), random >> 16));
}

// The last run that begins at or before i.
__device__ int64_t run_of(const AdamWRun* runs, int64_t count, int64_t i) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (runs[middle].begin <= i ? low : high) = middle;
  }
  return low;
}

template <typename Moment>
__global__ void __launch_bounds__(kAdamWThreads) adamw_kernel(AdamWCuda p) {
  constexpr bool kRounds = sizeof(Moment) == 2;
  static_assert(kVector == kRoundingGroup);
  __shared__ AdamWCoefficients shared;
  __shared__ int64_t first_run;
  __shared__ bool skip;
  const int64_t begin = int64_t{blockIdx.x} * kBlock;
  if (threadIdx.x == 0) {
    shared = *p.coefficients;
    const float clip = p.clip_factor == nullptr ? 1.0f : *p.clip_factor;
    skip = isnan(clip);
    shared.grad_scale *= clip;
    first_run = run_of(p.runs, p.run_count, begin);
  }
  __syncthreads();
  if (skip) return;
  const AdamWCoefficients c = shared;
  auto* const exp_avg = static_cast<Moment*>(p.exp_avg);
  auto* const exp_avg_sq = static_cast<Moment*>(p.exp_avg_sq);
  int64_t run = first_run;
  const auto run_at = [&](int64_t i) {
    while (run + 1 < p.run_count && p.runs[run + 1].begin <= i) ++run;
    return p.runs[run];
  };
  const int64_t at = begin + int64_t{threadIdx.x} * kVector;
  // A run of many matrices is left without reading them.
  if (at < p.size && run_at(at).skip &&
      (run + 1 == p.run_count || p.runs[run + 1].begin >= at + kVector)) {
    return;
  }
  if (at + kVector <= p.size) {
    float w[kVector], g[kVector], m[kVector], v[kVector];
    load(p.grad + at, g);
    auto* const upper = reinterpret_cast<Bf16Vector*>(p.weight + at);
    auto* const lower = reinterpret_cast<RestVector*>(p.weight_rest + at);
    Bf16Vector bf16 = *upper;
    RestVector rest = *lower;
    load(exp_avg + at, m);
    load(exp_avg_sq + at, v);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      w[k] = join(bf16.value[k], rest.value[k]);
      const AdamWRun at_k = run_at(at + k);
      if (at_k.skip) continue;
      update(c, at_k.decay ? c.decay : 1.0f, __fmul_rn(g[k], c.grad_scale), w[k], m[k], v[k]);
      split(w[k], bf16.value[k], rest.value[k]);
    }
    *upper = bf16;
    *lower = rest;
    if constexpr (kRounds) {
      const PhiloxBits bits = rounding_bits(p.seed, c.step, (p.first + at) / kRoundingGroup);
#pragma unroll
      for (int k = 0; k < kVector; ++k) round_moments(bits, k, m[k], v[k]);
    }
    store(m, exp_avg + at);
    store(v, exp_avg_sq + at);
    return;
  }
  for (int64_t i = at; i < p.size; ++i) {
    float m = as_float(exp_avg[i]), v = as_float(exp_avg_sq[i]);
    float w = join(p.weight[i], p.weight_rest[i]);
    const AdamWRun at_i = run_at(i);
    if (at_i.skip) continue;
    update(c, at_i.decay ? c.decay : 1.0f, __fmul_rn(p.grad[i], c.grad_scale), w, m, v);
    split(w, p.weight[i], p.weight_rest[i]);
    if constexpr (kRounds) {
      const int64_t place = p.first + i;
      round_moments(rounding_bits(p.seed, c.step, place / kRoundingGroup), place % kRoundingGroup,
                    m, v);
    }
    assign(exp_avg[i], m);
    assign(exp_avg_sq[i], v);
  }
}

constexpr int kNormThreads = 512;
constexpr int64_t kNormBlock = 1 << 14;  // values of one partial sum

__device__ double block_sum(double value) {
  __shared__ double of_warp[kNormThreads / 32];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0.0;
  for (int warp = 0; warp < kNormThreads / 32; ++warp) sum += of_warp[warp];
  return sum;
}

__global__ void __launch_bounds__(kNormThreads) squares_kernel(GradientNormCuda p) {
  const int64_t begin = int64_t{blockIdx.x} * kNormBlock;
  const int64_t end = begin + kNormBlock < p.size ? begin + kNormBlock : p.size;
  double sum = 0.0;
#pragma unroll 4
  for (int64_t at = begin + int64_t{threadIdx.x} * kVector; at < end;
       at += kNormThreads * kVector) {
    float values[kVector] = {};
    if (at + kVector <= end) {
      load(p.grad + at, values);
    } else {
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        if (at + k < end) values[k] = p.grad[at + k];
      }
    }
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const double value = values[k];
      sum = fma(value, value, sum);
    }
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) p.partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kNormThreads) norm_kernel(GradientNormCuda p, int64_t count) {
  double sum = 0.0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < count; i += kNormThreads) sum += p.partial[i];
  sum = block_sum(sum);
  if (threadIdx.x != 0) return;
  GradientNorm result;
  result.norm = sqrt(sum);
  if (!isfinite(result.norm)) {
    result.clip_factor = nanf("");
  } else if (p.clip_norm > 0.0 && result.norm > p.clip_norm) {
    result.clip_factor = static_cast<float>(p.clip_norm / result.norm);
  }
  *p.result = result;
}

}  // namespace

cudaError_t launch_adamw(const AdamWCuda& p, cudaStream_t stream) {
  if (p.size == 0) return cudaSuccess;
  if (p.first % kRoundingGroup != 0) return cudaErrorInvalidValue;
  const auto blocks = static_cast<unsigned>((p.size + kBlock - 1) / kBlock);
  if (p.moments == MomentDType::kF32) {
    adamw_kernel<float><<<blocks, kAdamWThreads, 0, stream>>>(p);
  } else {
    adamw_kernel<__nv_bfloat16><<<blocks, kAdamWThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

int64_t gradient_norm_partials(int64_t size) { return (size + kNormBlock - 1) / kNormBlock; }

cudaError_t launch_gradient_norm(const GradientNormCuda& p, cudaStream_t stream) {
  const int64_t count = gradient_norm_partials(p.size);
  if (count > 0) {
    squares_kernel<<<static_cast<unsigned>(count), kNormThreads, 0, stream>>>(p);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  norm_kernel<<<1, kNormThreads, 0, stream>>>(p, count);
  return cudaGetLastError();
}

}  // namespace twell
