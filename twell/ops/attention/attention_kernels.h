// SPDX-License-Identifier: Apache-2.0
// The attention problem in device memory, and the launches of our own kernels. Plain types, which
// nvcc compiles; attention_cuda.h is the interface.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/format/kv_blocks.h"

namespace twell {

// Sequences as cuDNN takes them. Few different sizes need few of its plans, so these are rounded
// up; further sequences are empty. cuDNN multiplies values behind the end of a sequence's keys, in
// its last block and in block 0, by zero: they must be finite.
struct AttentionRagged {
  int64_t count = 0;          // 0: not made
  int64_t max_q_len = 0;      // rounded up
  int64_t max_kv_len = 0;     // rounded up
  int32_t* q_len = nullptr;   // [count]
  int32_t* kv_len = nullptr;  // [count]
  int32_t* q_at = nullptr;    // [count + 1] where a sequence begins in q, in elements
  int32_t* out_at = nullptr;  // [count + 1] in out
  int32_t* kv_at = nullptr;   // [count + 1] in k and v, without tables
  int32_t* blocks = nullptr;  // [count, max_kv_len / kKvBlock] the tables, with tables
};

// Arrays in device memory, so that a captured graph can be replayed with other lengths and tables.
// No kernel on the stream writes them: decode reads them while the kernel before it still runs.
struct AttentionSequencesCuda {
  int64_t count = 0;
  int64_t max_q_len = 0;             // upper bound of q_len
  int64_t max_kv_len = 0;            // upper bound of kv_len
  int64_t rows = 0;                  // of q; without tables not fewer than k and v have
  const int32_t* q_begin = nullptr;  // [count] first row in q and out
  const int32_t* q_len = nullptr;    // [count]
  const int32_t* kv_len = nullptr;   // [count] at least q_len; 0 with q_len 0
  // [count] first row in k and v; with tables, where the sequence's table of blocks begins
  const int64_t* kv_begin = nullptr;
  const int32_t* tables = nullptr;  // format/kv_blocks.h; null: sequences are contiguous
  int64_t blocks = 0;               // of k and v, with tables
  // Every sequence has q_len = kv_len = max_q_len, sequence i starting at row i * max_q_len of q, k
  // and v.
  bool uniform = false;
  AttentionRagged ragged;  // attention_ragged()
};

struct AttentionCuda {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  AttentionSequencesCuda sequences;
  const __nv_bfloat16* q = nullptr;  // rows of H * hd, q_stride apart
  int64_t q_stride = 0;
  const __nv_bfloat16* k = nullptr;  // rows of H_kv * hd, kv_stride apart
  const __nv_bfloat16* v = nullptr;
  int64_t kv_stride = 0;
  int64_t window = 0;            // keys that a query sees, its own included; 0: all before it
  __nv_bfloat16* out = nullptr;  // [M, H * hd]
  float* logsumexp = nullptr;    // [sequences, H, max_q_len] or null; cuDNN alone writes it
  const __nv_bfloat16* mask = nullptr;  // of DocumentMask or null; cuDNN alone takes one
};

// Keys of a sequence are cut into pieces of `keys`; each leaves a partial result.
struct AttentionSplits {
  int64_t max_sequences = 0;
  int64_t count = 0;  // splits of the longest sequence
  int64_t keys = 0;
  float* values = nullptr;     // [sequences, H, count, hd]
  float* max_sum = nullptr;    // [sequences, H, count, 2]: maximum (base 2), sum
  int32_t* arrived = nullptr;  // [sequences, H] splits done so far, 0 between calls
};

// Writes the arrays of `ragged`, whose sizes are set, for the problem's sequences.
cudaError_t launch_attention_ragged(const AttentionCuda& problem, const AttentionRagged& ragged,
                                    cudaStream_t stream);
cudaError_t launch_attention_tiled(const AttentionCuda& problem, cudaStream_t stream);
// max_q_len 1, with tables; query i is row q_begin[i]. splits.keys is a multiple of kKvBlock, at
// most 32 blocks.
cudaError_t launch_attention_decode(const AttentionCuda& problem, const AttentionSplits& splits,
                                    cudaStream_t stream);

}  // namespace twell
