// SPDX-License-Identifier: Apache-2.0
// Entry points, and the kernels that write what cuDNN takes besides q, k and v.
#include "twell/ops/attention/attention_cuda.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "twell/base/carver.h"
#include "twell/ops/attention/attention_train_cuda.h"

namespace twell {
namespace {

constexpr int64_t kMaxRagged = 256;  // sequences; bounds the workspace

// 1, 4, 16, 64, 256: cuDNN passes over empty sequences quickly.
int64_t ragged_count(int64_t sequences) {
  int64_t count = 1;
  while (count < sequences) count *= 4;
  return count;
}

// The arrays from `memory` on, and their size in int32.
struct RaggedMemory {
  AttentionRagged arrays;
  int64_t size;
};
RaggedMemory ragged_memory(int32_t* memory, int64_t count, int64_t max_kv_len) {
  AttentionRagged to{.count = count,
                     .max_kv_len = (max_kv_len + kKvBlock - 1) / kKvBlock * kKvBlock};
  Carver carver(memory, 64);
  for (int32_t** array : {&to.q_len, &to.kv_len, &to.q_at, &to.out_at, &to.kv_at}) {
    *array = carver.take<int32_t>(count + 1);
  }
  to.blocks = carver.take<int32_t>(count * (to.max_kv_len / kKvBlock));
  return {to, carver.bytes() / static_cast<int64_t>(sizeof(int32_t))};
}

int64_t most_ragged(int64_t max_sequences) {
  return ragged_count(std::min(max_sequences, kMaxRagged));
}

constexpr int kThreads = 128;

// A CTA writes the lengths, the offsets and the table of a sequence as cuDNN takes them.
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

constexpr int kColumns = 8;  // of a thread: 16 bytes

// exp() of a score this low is 0. It is finite because all keys of a tile may be masked: the
// running maximum of the softmax would then be -infinity, and a score minus it NaN.
constexpr float kMasked = -1e30f;

// A block writes kThreads * kColumns columns of the row of one token.
__global__ void __launch_bounds__(kThreads) document_mask_kernel(DocumentMask p, int row_columns) {
  const int64_t token = blockIdx.x;
  const int column =
      (static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x)) * kColumns;
  if (column >= row_columns) return;
  int64_t begin = p.begins[token];
  if (p.window > 0) begin = max(begin, token % p.length + 1 - p.window);
  alignas(16) __nv_bfloat16 values[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    values[i] = __float2bfloat16(column + i < begin ? kMasked : 0.0f);
  }
  *reinterpret_cast<uint4*>(p.mask + token * row_columns + column) =
      *reinterpret_cast<const uint4*>(values);
}

}  // namespace

AttentionWorkspaceCuda::AttentionWorkspaceCuda(int64_t max_sequences, int64_t heads,
                                               int64_t head_dim, int64_t max_kv_len)
    : max_sequences_(max_sequences),
      max_kv_len_(max_kv_len),
      ragged_count_(most_ragged(max_sequences)),
      partial_splits_(attention_partial_splits(max_sequences, max_kv_len)),
      max_sums_(partial_splits_ * heads * 2),
      values_(partial_splits_ * heads * head_dim),
      arrived_(max_sequences * heads),
      ragged_(ragged_memory(nullptr, ragged_count_, max_kv_len).size) {
  TWELL_CUDA_CHECK(cudaMemset(arrived_.data(), 0, static_cast<size_t>(arrived_.bytes())));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));  // our streams do not wait for it
}

int64_t AttentionWorkspaceCuda::bytes_needed(int64_t max_sequences, int64_t heads, int64_t head_dim,
                                             int64_t max_kv_len) {
  return attention_partial_splits(max_sequences, max_kv_len) * heads * (head_dim + 2) *
             static_cast<int64_t>(sizeof(float)) +
         (max_sequences * heads +
          ragged_memory(nullptr, most_ragged(max_sequences), max_kv_len).size) *
             static_cast<int64_t>(sizeof(int32_t));
}

AttentionSplits AttentionWorkspaceCuda::splits(const AttentionDivision& division,
                                               int64_t sequences) const {
  TWELL_CHECK(division.splits == 1 || sequences * division.splits <= partial_splits_,
              "attention: {} splits of each of {} sequences in a workspace for {}", division.splits,
              sequences, partial_splits_);
  return {.count = division.splits,
          .warps = division.warps,
          .loads = division.loads,
          .values = values_.data(),
          .max_sum = max_sums_.data(),
          .arrived = arrived_.data()};
}

AttentionRagged AttentionWorkspaceCuda::ragged(int64_t count) const {
  if (count > ragged_count_) return {};
  return ragged_memory(ragged_.data(), count, max_kv_len_).arrays;
}

AttentionRagged attention_ragged(CudaContext& ctx, const AttentionCuda& problem,
                                 const AttentionWorkspaceCuda& workspace) {
  const AttentionSequencesCuda& sequences = problem.sequences;
  if (sequences.tables == nullptr || !route::ragged_attention_pays(sequences.max_q_len) ||
      ctx.compute_capability() < 90 || !cudnn_found()) {
    return {};
  }
  // cuDNN's offsets are 32-bit.
  const int64_t stride = std::max(problem.q_stride, problem.heads * problem.head_dim);
  if (sequences.rows * stride > std::numeric_limits<int32_t>::max()) return {};
  AttentionRagged ragged = workspace.ragged(ragged_count(sequences.count));
  if (ragged.count == 0) return {};
  ragged.max_q_len =
      static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(sequences.max_q_len)));
  attention_ragged_kernel<<<static_cast<unsigned>(ragged.count + 1), kThreads, 0, ctx.stream()>>>(
      problem, ragged);
  TWELL_CUDA_CHECK_LAUNCH("attention_ragged_kernel");
  return ragged;
}

const char* attention_unsupported(int64_t head_dim) {
  if (head_dim % 8 != 0) return "attention on the GPU needs a head size that is a multiple of 8";
  if (head_dim > 256) return "attention on the GPU takes heads of at most 256";
  return nullptr;
}

void attention_cuda(CudaContext& ctx, const AttentionCuda& problem,
                    const AttentionWorkspaceCuda& workspace) {
  const char* why = attention_unsupported(problem.head_dim);
  TWELL_CHECK(why == nullptr, "{}, got {}", why, problem.head_dim);
  TWELL_CHECK(problem.kv_heads > 0 && problem.heads % problem.kv_heads == 0,
              "attention: {} heads on {} key/value heads", problem.heads, problem.kv_heads);
  if (problem.sequences.count == 0 || problem.sequences.max_q_len == 0) return;
  TWELL_CHECK(problem.k8.data == nullptr || problem.sequences.max_q_len == 1,
              "attention of {} queries of a sequence to keys in 8 bits",
              problem.sequences.max_q_len);
  if (route::attention_kernel(problem.sequences.max_q_len, problem.sequences.tables != nullptr) ==
      route::AttentionKernel::kDecode) {
    TWELL_CHECK(problem.sequences.count <= workspace.max_sequences(),
                "attention: {} sequences in a workspace for {}", problem.sequences.count,
                workspace.max_sequences());
    const AttentionDivision division =
        attention_division(problem, workspace.max_kv_len(), ctx.multiprocessors());
    TWELL_CUDA_CHECK(launch_attention_decode(
        problem, workspace.splits(division, problem.sequences.count), ctx.stream()));
    return;
  }
  if (attention_cudnn(ctx, problem)) return;
  TWELL_CUDA_CHECK(launch_attention_tiled(problem, ctx.stream()));
}

cudaError_t launch_document_mask(const DocumentMask& p, cudaStream_t stream) {
  const int64_t columns = document_mask_row(p.length);
  const dim3 grid(static_cast<unsigned>(p.sequences * p.length),
                  static_cast<unsigned>(ceil_div(columns, int64_t{kThreads * kColumns})));
  document_mask_kernel<<<grid, kThreads, 0, stream>>>(p, static_cast<int>(columns));
  return cudaGetLastError();
}

}  // namespace twell
