// SPDX-License-Identifier: Apache-2.0
// The integers that describe a batch of sequences to the kernels. They are written to page-locked
// memory and copied to the device in one piece. Their addresses depend only on the numbers of
// tokens and sequences, so that a captured graph stays valid.
#pragma once

#include <cstddef>
#include <cstdint>

#include "twell/base/cuda.h"

namespace twell {

struct BatchArrays {
  int32_t* ids = nullptr;         // [M]
  int32_t* positions = nullptr;   // [M]
  int32_t* rows = nullptr;        // [M] rows_by_id of the ids, in batches that are sorted
  int32_t* row_tokens = nullptr;  // [M] the token of each of these rows
  int64_t* cache_rows = nullptr;  // [M] rows of the cache, if there is one
  int32_t* q_begin = nullptr;     // [S]; from here on: see AttentionSequencesCuda
  int32_t* q_len = nullptr;
  int32_t* kv_len = nullptr;
  int64_t* kv_begin = nullptr;    // with a cache: where the sequence's table begins
  int64_t* wide_begin = nullptr;  // [S] with a cache in 8 bits: first block of the copy in bf16
  float* uniforms = nullptr;      // [S] random numbers of the sampler
  size_t bytes = 0;               // total size
};

// These arrays in both places, for one batch in flight.
class BatchCuda {
 public:
  BatchCuda(int64_t max_tokens, int64_t max_sequences);
  ~BatchCuda();
  BatchCuda(const BatchCuda&) = delete;
  BatchCuda& operator=(const BatchCuda&) = delete;

  // The page-locked arrays, after waiting until the previous copy has read them.
  BatchArrays host(int64_t tokens, int64_t sequences);
  BatchArrays device(int64_t tokens, int64_t sequences) const;
  void enqueue_copy(CudaContext& ctx, int64_t tokens, int64_t sequences) const;

  int64_t max_tokens() const { return max_tokens_; }
  int64_t max_sequences() const { return max_sequences_; }

 private:
  int64_t max_tokens_, max_sequences_;
  DeviceBuffer<std::byte> device_;
  PinnedBuffer<std::byte> host_;
  CudaEvent copied_;
};

}  // namespace twell
