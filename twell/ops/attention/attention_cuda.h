// SPDX-License-Identifier: Apache-2.0
// Causal attention with grouped key/value heads on the GPU, bf16 with f32 accumulation. Same
// meaning as attention.h: head h of the queries reads key/value head h / (H / H_kv); query i of a
// sequence sees keys 0 .. kv_len - q_len + i, or the last `window` of them.
//
// One query per sequence over a paged cache (decode) runs a kernel that reads the visible keys and
// values once, in bf16 or in 8 bits. How it divides a sequence's keys depends on the workspace, the
// number of sequences and the sequence's own length: in batches of as many sequences, one gives the
// same bits whatever the others are. Where cuDNN is found it runs uniform batches of whole
// sequences no longer than the window and, from Hopper on, what attention_ragged() prepared;
// everything else runs our tiled kernel. hd is a multiple of 8, at most 256. Never synchronises.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <compare>
#include <cstdint>
#include <string>

#include "twell/base/cuda.h"
#include "twell/format/kv_blocks.h"
#include "twell/ops/route/route.h"

namespace twell {

// Kernels take powers of two: e^x = 2^(kLog2E x).
inline constexpr float kLog2E = 1.4426950408889634f;

// Sequences as cuDNN takes them. Few different sizes need few of its plans, so these are rounded
// up; further sequences are empty. cuDNN multiplies values behind the end of a sequence's keys, in
// its last block (launch_kv_clear_behind) and in block 0, by zero: they must be finite.
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
  KvBytes k8, v8;                // decode alone takes them: in place of k and v if k8 is given
  int64_t window = 0;            // keys that a query sees, its own included; 0: all before it
  __nv_bfloat16* out = nullptr;  // [M, H * hd]
  float* logsumexp = nullptr;    // [sequences, H, max_q_len] or null; cuDNN alone writes it
  const __nv_bfloat16* mask = nullptr;  // of DocumentMask or null; cuDNN alone takes one
};

using route::attention_partial_splits;
using route::AttentionDivision;

// A division and the memory for it. Each split of a sequence leaves a partial result.
struct AttentionSplits {
  int64_t count = 0;           // of a sequence, at most
  int warps = 0;               // of a CTA
  int loads = 0;               // of AttentionDivision
  float* values = nullptr;     // [sequences, H, count, hd]
  float* max_sum = nullptr;    // [sequences, H, count, 2]: maximum (base 2), sum
  int32_t* arrived = nullptr;  // [sequences, H] splits done so far, 0 between calls
};

// Partial results of split keys, and sequences as cuDNN takes them: one batch in flight.
class AttentionWorkspaceCuda {
 public:
  // For decode of up to max_sequences sequences of up to max_kv_len keys.
  AttentionWorkspaceCuda(int64_t max_sequences, int64_t heads, int64_t head_dim,
                         int64_t max_kv_len);
  static int64_t bytes_needed(int64_t max_sequences, int64_t heads, int64_t head_dim,
                              int64_t max_kv_len);
  int64_t max_sequences() const { return max_sequences_; }
  int64_t max_kv_len() const { return max_kv_len_; }
  // For a division of so many sequences. Error if it has more than attention_partial_splits().
  AttentionSplits splits(const AttentionDivision& division, int64_t sequences) const;
  // Memory for so many ragged sequences of the workspace's length; count 0 if they are too many.
  AttentionRagged ragged(int64_t count) const;

 private:
  int64_t max_sequences_, max_kv_len_, ragged_count_, partial_splits_;
  DeviceBuffer<float> max_sums_, values_;
  DeviceBuffer<int32_t> arrived_, ragged_;
};

// Prepares prompts over a paged cache, which lie one behind the other in q, for cuDNN. Enqueue it
// once for a batch and pass the result in `sequences.ragged` to the calls of all layers. Makes
// nothing (count 0) where our own kernel is wanted: without cuDNN, before Hopper, and for prompts
// so short that cuDNN gains nothing.
AttentionRagged attention_ragged(CudaContext& ctx, const AttentionCuda& problem,
                                 const AttentionWorkspaceCuda& workspace);

// Error for shapes that are not supported (attention_unsupported says which).
void attention_cuda(CudaContext& ctx, const AttentionCuda& problem,
                    const AttentionWorkspaceCuda& workspace);

// Why this head size cannot run; null when it can.
const char* attention_unsupported(int64_t head_dim);

// cuDNN's forward for uniform batches and ragged ones; false if cuDNN is missing or does not take
// the shape, or a sequence of a uniform batch is longer than the window.
bool attention_cudnn(CudaContext& ctx, const AttentionCuda& problem);
bool cudnn_found();
// "cuDNN 9.19.0", or why it is not used.
const char* cudnn_status();
// What the last uniform or ragged batch of this context ran on: cuDNN, or our own kernel and why.
std::string attention_report(CudaContext& ctx);

// Our own kernels.
cudaError_t launch_attention_tiled(const AttentionCuda& problem, cudaStream_t stream);
// The division for the problem's heads and number of sequences, of up to max_kv_len keys each. How
// long they are does not matter, so that a captured graph serves all lengths.
AttentionDivision attention_division(const AttentionCuda& problem, int64_t max_kv_len,
                                     int multiprocessors);
// max_q_len 1, with tables; query i is row q_begin[i]. The splits are of a division that
// attention_division() gives for these heads, for some number of sequences.
cudaError_t launch_attention_decode(const AttentionCuda& problem, const AttentionSplits& splits,
                                    cudaStream_t stream);

}  // namespace twell
