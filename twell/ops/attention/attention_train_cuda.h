// SPDX-License-Identifier: Apache-2.0
// Causal attention of a training batch on the GPU, forward and backward, through cuDNN: B sequences
// of S tokens each, every token's queries, keys and values in one row. bf16 with f32 accumulation;
// same meaning as attention.h.
//   qkv, d_qkv [B * S, (H + 2 H_kv) * hd] as [q | k | v]; out, d_out [B * S, H * hd];
//   logsumexp [B, H, S] f32, of the scaled scores in nats
//
// With a sliding window, tokens attend to no keys further back; a window as long as the sequences
// is none. A document mask holds the window itself, because cuDNN takes no mask beside a window.
//
// With a document mask, tokens attend only to tokens of their own document. cuDNN adds the mask to
// the scores, so one graph serves all batches, but masked scores are computed too. cuDNN's packed
// sequences would skip them, but their deterministic backward stores S^2 scores per head for every
// document that a batch could have.
//
// The backward pass is deterministic: cuDNN stores the gradient of the scores, [H, S, S] bf16 per
// sequence, instead of adding to d_q atomically. It takes as many sequences at a time as keep that
// below kMaxScoreBytes (one at least).
//
// Error if cuDNN is not found or has no kernel: head sizes are multiples of 8, at most 128 (256 on
// Hopper), and S is at least 2. The first call of a shape allocates; later ones only enqueue.
#pragma once

#include <cuda_bf16.h>

#include <compare>
#include <cstdint>
#include <string>

#include "twell/base/cuda.h"
#include "twell/base/rounding.h"

namespace twell {

// Why sequences of this length with heads of this size cannot be trained on the current device;
// empty when they can.
std::string attention_train_unsupported(int64_t head_dim, int64_t length);

inline constexpr int64_t kMaxScoreBytes = int64_t{512} << 20;

struct AttentionTrainShape {
  int64_t sequences = 0;  // B
  int64_t length = 0;     // S, at least 2
  int64_t heads = 0;      // H
  int64_t kv_heads = 0;   // H_kv, divides H
  int64_t head_dim = 0;   // hd
  bool document_mask = false;
  int64_t window = 0;  // keys that a token attends to, its own included; 0: all before it

  int64_t row() const { return (heads + 2 * kv_heads) * head_dim; }
  auto operator<=>(const AttentionTrainShape&) const = default;
};

// A row of a mask: [S] rounded up to whole tiles of cuDNN's kernels.
inline int64_t document_mask_row(int64_t length) { return round_up(length, int64_t{128}); }

struct DocumentMask {
  int64_t sequences = 0;            // B
  int64_t length = 0;               // S
  const int32_t* begins = nullptr;  // [B * S] where each token's document begins in its sequence
  __nv_bfloat16* mask = nullptr;    // [B * S, document_mask_row(S)] out: 0, or -1e30 for the keys
                                    // before that and those outside of the window
  int64_t window = 0;  // keys that a token attends to, its own included; 0: all of its document
};
cudaError_t launch_document_mask(const DocumentMask& problem, cudaStream_t stream);

struct AttentionTrainForward {
  AttentionTrainShape shape;
  const __nv_bfloat16* qkv = nullptr;
  __nv_bfloat16* out = nullptr;
  float* logsumexp = nullptr;
  const __nv_bfloat16* mask = nullptr;  // of DocumentMask; null without a document mask
};
void attention_train_forward(CudaContext& ctx, const AttentionTrainForward& problem);

struct AttentionTrainBackward {
  AttentionTrainShape shape;
  const __nv_bfloat16* qkv = nullptr;
  const __nv_bfloat16* out = nullptr;
  const float* logsumexp = nullptr;
  const __nv_bfloat16* d_out = nullptr;
  __nv_bfloat16* d_qkv = nullptr;       // written
  const __nv_bfloat16* mask = nullptr;  // as in the forward pass
};
void attention_train_backward(CudaContext& ctx, const AttentionTrainBackward& problem);

}  // namespace twell
