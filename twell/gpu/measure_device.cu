// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <limits>

#include "twell/gpu/measure_device_cuda.h"
#include "twell/gpu/warp_mma.cuh"

namespace twell {
namespace {

constexpr int kMeasureThreads = 256;
constexpr int kRuns = 5;

// Sums what it reads, so that the reads stay; `out` is written in one case of 2^32.
__global__ void __launch_bounds__(kMeasureThreads)
    read_memory_kernel(const uint4* __restrict__ from, int64_t count, uint32_t* out) {
  uint32_t sum = 1;
  const int64_t step = int64_t{gridDim.x} * kMeasureThreads;
#pragma unroll 8
  for (int64_t i = int64_t{blockIdx.x} * kMeasureThreads + threadIdx.x; i < count; i += step) {
    const uint4 v = from[i];
    sum += v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0) *out = sum;
}

constexpr int kSums = 8;  // that do not depend on each other, per warp
constexpr int kRounds = 2048;
constexpr double kFlopsOfMma = 2.0 * 16 * 8 * 16;
__global__ void __launch_bounds__(kMeasureThreads) multiply_kernel(float* out) {
  float sums[kSums][4] = {};
  const uint32_t a = threadIdx.x * 0x00010001u, b = 0x3f803f80u;  // tiny values, and ones
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
#pragma unroll
    for (auto& sum : sums) gpu::mma_16x8x16(sum, a, a, a, a, b, b);
  }
  float all = 0.0f;
  for (const auto& sum : sums) all += sum[0] + sum[1] + sum[2] + sum[3];
  if (all < 0.0f) *out = all;
}

__global__ void empty_kernel() {}

class Events {
 public:
  ~Events() {
    if (begin_ != nullptr) cudaEventDestroy(begin_);
    if (end_ != nullptr) cudaEventDestroy(end_);
  }
  cudaError_t create() {
    const cudaError_t status = cudaEventCreate(&begin_);
    return status != cudaSuccess ? status : cudaEventCreate(&end_);
  }
  // The fewest microseconds that `work` took, of several runs behind one that warms up.
  template <typename Work>
  cudaError_t best(cudaStream_t stream, const Work& work, double& us) const {
    us = std::numeric_limits<double>::max();
    for (int run = 0; run <= kRuns; ++run) {
      cudaError_t status = cudaEventRecord(begin_, stream);
      work();
      if (status == cudaSuccess) status = cudaGetLastError();
      if (status == cudaSuccess) status = cudaEventRecord(end_, stream);
      if (status == cudaSuccess) status = cudaEventSynchronize(end_);
      float ms = 0.0f;
      if (status == cudaSuccess) status = cudaEventElapsedTime(&ms, begin_, end_);
      if (status != cudaSuccess) return status;
      if (run > 0) us = std::min(us, 1e3 * static_cast<double>(ms));
    }
    return cudaSuccess;
  }

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

cudaError_t measure(cudaStream_t stream, void* memory, int64_t bytes, DeviceFigures& figures) {
  int device = 0, sms = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  }
  Events events;
  if (status == cudaSuccess) status = events.create();
  if (status == cudaSuccess)
    status = cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), stream);
  if (status != cudaSuccess) return status;
  const auto ctas = static_cast<unsigned>(8 * sms);
  double us = 0.0;
  status = events.best(
      stream,
      [&] {
        read_memory_kernel<<<ctas, kMeasureThreads, 0, stream>>>(
            static_cast<const uint4*>(memory), bytes / 16, static_cast<uint32_t*>(memory));
      },
      us);
  if (status != cudaSuccess) return status;
  figures.bandwidth = static_cast<double>(bytes) / us;

  const auto filled = static_cast<unsigned>(2 * sms);
  status = events.best(
      stream,
      [&] { multiply_kernel<<<filled, kMeasureThreads, 0, stream>>>(static_cast<float*>(memory)); },
      us);
  if (status != cudaSuccess) return status;
  figures.mma_flops = kFlopsOfMma * kSums * kRounds * (kMeasureThreads / 32.0) * filled / us;

  constexpr int kLaunches = 200;
  status = events.best(
      stream,
      [&] {
        for (int i = 0; i < kLaunches; ++i) empty_kernel<<<1, 32, 0, stream>>>();
      },
      us);
  figures.launch_us = us / kLaunches;
  return status;
}

}  // namespace

cudaError_t measure_device_cuda(cudaStream_t stream, DeviceFigures& figures) {
  size_t free = 0, total = 0;
  cudaError_t status = cudaMemGetInfo(&free, &total);
  if (status != cudaSuccess) return status;
  // Several times an L2 cache, and a multiple of 16 bytes.
  const int64_t bytes =
      std::min<int64_t>(int64_t{1} << 30, static_cast<int64_t>(free / 2) / 16 * 16);
  void* memory = nullptr;
  status = cudaMalloc(&memory, static_cast<size_t>(bytes));
  if (status != cudaSuccess) return status;
  status = measure(stream, memory, bytes, figures);
  const cudaError_t freed = cudaFree(memory);
  return status != cudaSuccess ? status : freed;
}

}  // namespace twell
