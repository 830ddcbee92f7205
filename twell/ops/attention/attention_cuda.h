// SPDX-License-Identifier: Apache-2.0
// Causal attention with grouped key/value heads on the GPU, bf16 with f32 accumulation. Same
// meaning as attention.h: head h of the queries reads key/value head h / (H / H_kv); query i of a
// sequence sees keys 0 .. kv_len - q_len + i, or the last `window` of them.
//
// One query per sequence over a paged cache (decode) runs a kernel that reads the visible keys and
// values once. Its number of key splits depends only on the workspace, so a sequence gives the same
// bits whatever else is in the batch. Where cuDNN is found it runs uniform batches of whole
// sequences no longer than the window and, from Hopper on, what attention_ragged() prepared;
// everything else runs our tiled kernel. hd is a multiple of 8, at most 256. Never synchronises.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "twell/base/cuda.h"
#include "twell/ops/attention/attention_kernels.h"

namespace twell {

// Partial results of split keys, and sequences as cuDNN takes them: one batch in flight.
class AttentionWorkspaceCuda {
 public:
  // For decode of up to max_sequences sequences of up to max_kv_len keys.
  AttentionWorkspaceCuda(int64_t max_sequences, int64_t heads, int64_t head_dim,
                         int64_t max_kv_len);
  static int64_t bytes_needed(int64_t max_sequences, int64_t heads, int64_t head_dim,
                              int64_t max_kv_len);
  const AttentionSplits& splits() const { return splits_; }
  // Memory for so many ragged sequences of the workspace's length; count 0 if they are too many.
  AttentionRagged ragged(int64_t count) const;

 private:
  AttentionSplits splits_;
  int64_t ragged_count_, max_kv_len_;
  DeviceBuffer<float> partial_;
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

}  // namespace twell
