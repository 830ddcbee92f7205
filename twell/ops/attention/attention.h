// SPDX-License-Identifier: Apache-2.0
// Causal attention with grouped key/value heads, f32, softmax scale 1/sqrt(hd), never a full
// [T, T] score matrix in memory. Head h of the queries reads key/value head h / (H / H_kv).
//   q, out, d_q, d_out [M, H * hd]; the keys and values of a sequence are rows of H_kv * hd.
// One problem holds several sequences (a training batch; a prefill or decode batch over a cache).
// Query i of a sequence is at position p = kv_len - q_len + i and sees keys 0 .. p; with a sliding
// window it sees the last `window` of them, keys p - window + 1 .. p.
#pragma once

#include <cstdint>
#include <span>

#include "twell/base/context.h"
#include "twell/base/matrix.h"

namespace twell {

struct AttentionShape {
  int64_t heads = 0;
  int64_t kv_heads = 0;  // divides heads
  int64_t head_dim = 0;
  int64_t window = 0;  // keys that a query sees, its own included; 0: all before it
};

// Rows in 8 bits: element c of head h in row j is data[j * H_kv * hd + h * hd + c] * scale[j * H_kv
// + h].
struct AttentionRows8 {
  const int8_t* data = nullptr;  // [rows, H_kv * hd]
  const float* scale = nullptr;  // [rows, H_kv]
};

struct AttentionSequence {
  int64_t q_begin = 0;  // first row of this sequence in q and out
  int64_t q_len = 0;
  ConstMatrixF k;  // [kv_len, H_kv * hd], kv_len >= q_len
  ConstMatrixF v;  // [kv_len, H_kv * hd]
  // Forward only: the keys and values are in blocks of block_rows rows. Key j of the sequence is
  // then row blocks[j / block_rows] * block_rows + j % block_rows of k and v; k.rows and v.rows are
  // still kv_len. Null: key j is row j. The result is the same to the bit.
  const int32_t* blocks = nullptr;
  int64_t block_rows = 0;
  // Forward only: if k8 is given, keys and values are these, and k and v have a shape but no data.
  AttentionRows8 k8, v8;
};
// Whether block_rows is possible: 16, 32 or a multiple of 64, so that no block straddles two tiles
// of keys, or a tile more than four blocks.
inline bool is_attention_block(int64_t block_rows) {
  return block_rows == 16 || block_rows == 32 || (block_rows > 0 && block_rows % 64 == 0);
}

struct AttentionForward {
  AttentionShape shape;
  std::span<const AttentionSequence> sequences;
  ConstMatrixF q;              // [M, H * hd]
  MatrixF out;                 // [M, H * hd]
  float* logsumexp = nullptr;  // [M, H] for the backward, or null (inference)
};
void attention_forward(Context& ctx, const AttentionForward& problem);

// Training: every sequence has kv_len == q_len, and its k and v are rows q_begin... of one buffer.
struct AttentionBackward {
  AttentionShape shape;
  std::span<const AttentionSequence> sequences;
  ConstMatrixF q;                    // [M, H * hd]
  ConstMatrixF out;                  // [M, H * hd]
  const float* logsumexp = nullptr;  // [M, H]
  ConstMatrixF d_out;                // [M, H * hd]
  MatrixF d_q;                       // [M, H * hd], written
  MatrixF d_k;                       // [M, H_kv * hd], written
  MatrixF d_v;                       // [M, H_kv * hd], written
};
void attention_backward(Context& ctx, const AttentionBackward& problem);

}  // namespace twell
