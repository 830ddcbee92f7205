// SPDX-License-Identifier: Apache-2.0
#include "twell/model/batch_cuda.h"

#include <type_traits>

#include "twell/base/carver.h"
#include "twell/base/error.h"

namespace twell {
namespace {

// The arrays, at consecutive places from `base` on.
BatchArrays cut(std::byte* base, int64_t tokens, int64_t sequences) {
  BatchArrays arrays;
  Carver carver(base, 8);
  const auto take = [&](auto*& array, int64_t n) {
    array = carver.take<std::remove_reference_t<decltype(*array)>>(n);
  };
  take(arrays.cache_rows, tokens);
  take(arrays.kv_begin, sequences);
  take(arrays.wide_begin, sequences);
  take(arrays.ids, tokens);
  take(arrays.positions, tokens);
  take(arrays.rows, tokens);
  take(arrays.row_tokens, tokens);
  take(arrays.q_begin, sequences);
  take(arrays.q_len, sequences);
  take(arrays.kv_len, sequences);
  take(arrays.uniforms, sequences);
  arrays.bytes = static_cast<size_t>(carver.bytes());
  return arrays;
}

}  // namespace

BatchCuda::BatchCuda(int64_t max_tokens, int64_t max_sequences)
    : max_tokens_(max_tokens),
      max_sequences_(max_sequences),
      device_(static_cast<int64_t>(cut(nullptr, max_tokens, max_sequences).bytes)),
      host_(device_.size()) {}

BatchCuda::~BatchCuda() { cudaEventSynchronize(copied_.get()); }

BatchArrays BatchCuda::host(int64_t tokens, int64_t sequences) {
  TWELL_CHECK(tokens <= max_tokens_ && sequences <= max_sequences_,
              "a batch of {} tokens in {} sequences, planned for {} and {}", tokens, sequences,
              max_tokens_, max_sequences_);
  copied_.synchronize();
  return cut(host_.data(), tokens, sequences);
}

BatchArrays BatchCuda::device(int64_t tokens, int64_t sequences) const {
  return cut(device_.data(), tokens, sequences);
}

void BatchCuda::enqueue_copy(CudaContext& ctx, int64_t tokens, int64_t sequences) const {
  const size_t bytes = cut(host_.data(), tokens, sequences).bytes;
  TWELL_CUDA_CHECK(
      cudaMemcpyAsync(device_.data(), host_.data(), bytes, cudaMemcpyHostToDevice, ctx.stream()));
  copied_.record(ctx.stream());
}

}  // namespace twell
