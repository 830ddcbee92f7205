// SPDX-License-Identifier: Apache-2.0
// Rows of keys and values in a cache on the GPU (format/kv_blocks.h): between bf16 and 8 bits, and
// those behind the ends of sequences. The rule of 8 bits is that of model/kv_cache.h: a head's
// scale is its largest magnitude over 127, and NaN where the head is not finite. Never
// synchronises; can be captured in a CUDA graph.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/format/kv_blocks.h"

namespace twell {

// Device memory throughout, rows 16-byte aligned. hd is a multiple of 8, at most 256.
struct KvStoreBytes {
  int64_t tokens = 0;  // M
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  const __nv_bfloat16* k = nullptr;  // [M, H_kv * hd], rows `stride` apart
  const __nv_bfloat16* v = nullptr;
  int64_t stride = 0;
  const int64_t* cache_rows = nullptr;  // [M] where the tokens go
  KvBytes keys, values;
};
cudaError_t launch_kv_store_bytes(const KvStoreBytes& problem, cudaStream_t stream);

// Copies sequences out of the cache as bf16: key j of sequence i becomes row
// first[i] * kKvBlock + j of k and v. Rows behind the end of a sequence, in its last block, are 0.
struct KvLoadBytes {
  int64_t sequences = 0;
  int64_t max_kv_len = 0;  // upper bound of kv_len
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  const int32_t* kv_len = nullptr;    // [sequences]
  const int64_t* kv_begin = nullptr;  // [sequences] where a sequence's table begins
  const int32_t* tables = nullptr;
  KvBytes keys, values;
  const int64_t* first = nullptr;  // [sequences] a sequence's first block in k and v
  __nv_bfloat16* k = nullptr;      // [rows, H_kv * hd]
  __nv_bfloat16* v = nullptr;
};
cudaError_t launch_kv_load_bytes(const KvLoadBytes& problem, cudaStream_t stream);

// Makes rows zero that lie behind the end of a sequence in its last block, in the values of all
// layers: cuDNN multiplies them by zero, and what an earlier sequence left there may be NaN. Such
// rows are nobody's until the sequence grows into them.
struct KvClearBehind {
  int64_t sequences = 0;
  int64_t layers = 0;
  int64_t layer_size = 0;             // values of a layer
  int64_t width = 0;                  // H_kv * hd, a multiple of 8
  const int32_t* kv_len = nullptr;    // [sequences]
  const int64_t* kv_begin = nullptr;  // [sequences] where a sequence's table begins
  const int32_t* tables = nullptr;
  __nv_bfloat16* v = nullptr;  // [layers, rows, width]
};
cudaError_t launch_kv_clear_behind(const KvClearBehind& problem, cudaStream_t stream);

}  // namespace twell
