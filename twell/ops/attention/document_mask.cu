// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/attention/attention_train_cuda.h"

namespace twell {
namespace {

constexpr int kThreads = 128;
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
  const int begin = p.begins[token];
  alignas(16) __nv_bfloat16 values[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    values[i] = __float2bfloat16(column + i < begin ? kMasked : 0.0f);
  }
  *reinterpret_cast<uint4*>(p.mask + token * row_columns + column) =
      *reinterpret_cast<const uint4*>(values);
}

}  // namespace

cudaError_t launch_document_mask(const DocumentMask& p, cudaStream_t stream) {
  const int64_t columns = document_mask_row(p.length);
  const dim3 grid(static_cast<unsigned>(p.sequences * p.length),
                  static_cast<unsigned>(ceil_div(columns, int64_t{kThreads * kColumns})));
  document_mask_kernel<<<grid, kThreads, 0, stream>>>(p, static_cast<int>(columns));
  return cudaGetLastError();
}

}  // namespace twell
