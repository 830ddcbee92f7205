// SPDX-License-Identifier: Apache-2.0
#include "twell/model/batch_cuda.h"

namespace twell {
namespace {

// Cuts `base` into the arrays, those of 8-byte integers first.
BatchArrays cut(std::byte* base, int64_t tokens, int64_t sequences) {
  BatchArrays arrays;
  size_t at = 0;
  const auto take = [&](auto*& array, int64_t n) {
    using T = std::remove_reference_t<decltype(*array)>;
    array = reinterpret_cast<T*>(base + at);
    at += static_cast<size_t>(n) * sizeof(T);
  };
  take(arrays.cache_rows, tokens);
  take(arrays.kv_begin, sequences);
  take(arrays.ids, tokens);
  take(arrays.positions, tokens);
  take(arrays.q_begin, sequences);
  take(arrays.q_len, sequences);
  take(arrays.kv_len, sequences);
  take(arrays.uniforms, sequences);
  arrays.bytes = at;
  return arrays;
}

}  // namespace

BatchCuda::BatchCuda(int64_t max_tokens, int64_t max_sequences)
    : max_tokens_(max_tokens),
      max_sequences_(max_sequences),
      device_(static_cast<int64_t>(cut(nullptr, max_tokens, max_sequences).bytes)) {
  TWELL_CUDA_CHECK(
      cudaMallocHost(reinterpret_cast<void**>(&host_), static_cast<size_t>(device_.bytes())));
  TWELL_CUDA_CHECK(cudaEventCreateWithFlags(&copied_, cudaEventDisableTiming));
}

BatchCuda::~BatchCuda() {
  cudaEventSynchronize(copied_);
  cudaEventDestroy(copied_);
  cudaFreeHost(host_);
}

BatchArrays BatchCuda::host(int64_t tokens, int64_t sequences) {
  TWELL_CHECK(tokens <= max_tokens_ && sequences <= max_sequences_,
              "a batch of {} tokens in {} sequences, planned for {} and {}", tokens, sequences,
              max_tokens_, max_sequences_);
  TWELL_CUDA_CHECK(cudaEventSynchronize(copied_));
  return cut(host_, tokens, sequences);
}

BatchArrays BatchCuda::device(int64_t tokens, int64_t sequences) const {
  return cut(device_.data(), tokens, sequences);
}

void BatchCuda::enqueue_copy(CudaContext& ctx, int64_t tokens, int64_t sequences) const {
  const size_t bytes = cut(host_, tokens, sequences).bytes;
  TWELL_CUDA_CHECK(
      cudaMemcpyAsync(device_.data(), host_, bytes, cudaMemcpyHostToDevice, ctx.stream()));
}

void BatchCuda::copied(CudaContext& ctx) const {
  TWELL_CUDA_CHECK(cudaEventRecord(copied_, ctx.stream()));
}

}  // namespace twell
