// SPDX-License-Identifier: Apache-2.0
// Lengths, offsets and tables of sequences as cuDNN takes them: a CTA writes those of a sequence.
#include "twell/ops/attention/attention_kernels.h"

namespace twell {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    attention_ragged_kernel(AttentionCuda p, AttentionRagged to) {
  const AttentionSequencesCuda& from = p.sequences;
  const auto i = static_cast<int>(blockIdx.x), last = static_cast<int>(from.count) - 1;
  const bool exists = i <= last;
  const int kv_len = exists ? from.kv_len[i] : 0;
  if (threadIdx.x == 0) {
    // The end of the last sequence is where those that do not exist begin.
    const int64_t q_row = exists ? from.q_begin[i] : from.q_begin[last] + from.q_len[last];
    to.q_at[i] = static_cast<int32_t>(q_row * p.q_stride);
    to.out_at[i] = static_cast<int32_t>(q_row * p.heads * p.head_dim);
    if (from.tables == nullptr) {
      const int64_t kv_row = exists ? from.kv_begin[i] : from.kv_begin[last] + from.kv_len[last];
      to.kv_at[i] = static_cast<int32_t>(kv_row * p.kv_stride);
    }
    if (i < to.count) {
      to.q_len[i] = exists ? from.q_len[i] : 0;
      to.kv_len[i] = kv_len;
    }
  }
  if (from.tables == nullptr || i == to.count) return;
  const int table_size = static_cast<int>(to.max_kv_len / kKvBlock);
  const int used = (kv_len + kKvBlock - 1) / kKvBlock;
  const int32_t* table = from.tables + (exists ? from.kv_begin[i] : 0);
  int32_t* const blocks = to.blocks + int64_t{i} * table_size;
  for (int at = static_cast<int>(threadIdx.x); at < table_size; at += kThreads) {
    blocks[at] = at < used ? table[at] : 0;
  }
}

}  // namespace

cudaError_t launch_attention_ragged(const AttentionCuda& problem, const AttentionRagged& ragged,
                                    cudaStream_t stream) {
  attention_ragged_kernel<<<static_cast<unsigned>(ragged.count + 1), kThreads, 0, stream>>>(problem,
                                                                                            ragged);
  return cudaGetLastError();
}

}  // namespace twell
