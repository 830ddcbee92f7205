// SPDX-License-Identifier: Apache-2.0
// Feed-forward calls of up to some thousand tokens on Hopper, bf16 with f32 accumulation:
//   gated:      g = relu(x w_gate^T), h = f(g) * (x w_up^T) where g is active, y = h w_down
//   non-gated:  h = f(relu(x w_up^T)), y = h w_down
// f(g) is g, or g^2 for relu2.
//   few tokens    decode rows (1 to 8) and small batches (9 to 64). They are bound by reading
//                 weights, so of all but the first weight only the rows of neurons active for at
//                 least one token are read. Up to 8 tokens may have the RMS norm of x computed in
//                 front. In e4m3 all of them run as small batches
//   medium batch  up to some thousand. Up and down run on the union of the active neurons of a tile
//                 of 128 tokens, like tile-union, but every kernel is cut into as many pieces as
//                 the device has SMs, also where there are few tiles. Unions are counted from 65
//                 tokens on: what layers measure are unions of 128 tokens
// Exact on every input: with every neuron active they read what the dense layer reads. g is rounded
// to bf16; h is rounded once, after the product in f32. A NaN in the gate counts as active.
// Deterministic. Never synchronise; can be captured in a CUDA graph. Error where the sizes do not
// suit (gate/gate_gemm_cuda.h) or exceed the workspace.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "twell/base/cuda.h"
#include "twell/format/activity_cuda.h"
#include "twell/format/byte_matrix_cuda.h"

namespace twell {

// All pointers are device memory, matrices contiguous row-major, 16-byte aligned.
struct BatchFfnCuda {
  int64_t tokens = 0;                     // M
  int64_t width = 0;                      // D, a multiple of 8
  int64_t ffn = 0;                        // F, a multiple of 8
  const __nv_bfloat16* x = nullptr;       // [M, D]
  const __nv_bfloat16* w_gate = nullptr;  // [F, D], or null: no gate
  const __nv_bfloat16* w_up = nullptr;    // [F, D]
  const __nv_bfloat16* w_down = nullptr;  // [F, D]
  __nv_bfloat16* y = nullptr;             // [M, D], every element written; x only with a norm
  const __nv_bfloat16* norm = nullptr;    // [D] weight of the norm, or null
  float eps = 1e-5f;                      // of the norm
  bool add = false;                       // y += instead of =
  ActivityCuda* activity = nullptr;       // added to, but for max_row_nnz; may be null
  bool squared = false;                   // f(g) = g^2
  bool up_relu = false;                   // dReLU: the ReLU of the product with w_up
  uint32_t cut = 0;                       // of FATReLU, see bf16_cut
  // The first weight may be read while the predecessor of this call still runs. Only for weights
  // that no earlier work on the stream writes.
  bool weights_are_constant = false;
  // Small batches of 1 to 64 tokens in e4m3, in place of x and the weights above; D is a multiple
  // of 16. Sums of e4m3 products get the scales of their rows; h stays in bf16.
  ByteRowsCuda x_bytes;     // [M, D]
  ByteRowsCuda gate_bytes;  // [F, D], empty without a gate
  ByteRowsCuda up_bytes;    // [F, D]
  ByteRowsCuda down_bytes;  // [F, D], scales [D]
};

inline constexpr int64_t kMaxFewTokens = 64, kMaxPortableBatch = 32;
namespace few_token {
inline constexpr int kRowTokens = 8;   // most tokens of decode rows
inline constexpr int kLeastRows = 16;  // neurons of a CTA of decode rows at a time, at least,
                                       // because a product always has 16 rows
}  // namespace few_token
// Limits of the kernel that streams a layer's rows: columns of a CTA and of a cluster of four of
// them, and CTAs, of which each SM runs one and no Hopper GPU has more.
inline constexpr int64_t kMaxStreamSlice = 1024, kMaxStreamWidth = 4096, kMaxStreams = 144;

// Device memory of one call in flight, for up to kMaxFewTokens.
class FewTokenWorkspace {
 public:
  explicit FewTokenWorkspace(int64_t max_ffn, int64_t max_width = kMaxStreamWidth);
  int64_t bytes() const {
    return hidden_.bytes() + fired_.bytes() + arrived_.bytes() + parts_.bytes() + active_.bytes();
  }

 private:
  friend void few_token_ffn_cuda(CudaContext&, const BatchFfnCuda&, FewTokenWorkspace&);
  friend void portable_rows_ffn_cuda(CudaContext&, const BatchFfnCuda&, FewTokenWorkspace&);
  friend void portable_batch_ffn_cuda(CudaContext&, const BatchFfnCuda&, FewTokenWorkspace&);
  friend void row_stream_ffn_cuda(CudaContext&, const BatchFfnCuda&, FewTokenWorkspace&);
  int64_t max_ffn_;
  DeviceBuffer<__nv_bfloat16> hidden_;  // [F, M rounded up to 8 or 64]
  DeviceBuffer<uint64_t> fired_;        // active neurons, 0 between calls
  DeviceBuffer<uint32_t> arrived_;      // 0 between calls
  DeviceBuffer<float> parts_;           // [clusters, 8, D] parts of y
  DeviceBuffer<uint32_t> active_;       // [F / 32] a bit per neuron, of portable-batch
  bool rows_prepared_ = false;  // the kernels of up to 8 tokens may take their shared memory
  // Clusters of small batches that fit into the device, in bf16 and in e4m3; 0: not prepared yet.
  int clusters_ = 0, byte_clusters_ = 0;
  int streams_[4] = {};  // the same of row streams, for clusters of 1 to 4 CTAs
};
void few_token_ffn_cuda(CudaContext& ctx, const BatchFfnCuda& problem,
                        FewTokenWorkspace& workspace);
// Up to 8 tokens of at most kMaxStreamWidth columns: faster than the above where more than a few
// percent of the neurons are active.
void row_stream_ffn_cuda(CudaContext& ctx, const BatchFfnCuda& problem,
                         FewTokenWorkspace& workspace);
// Up to 8 tokens on every GPU of compute capability 8.0 and later, whose x [M, D] fits into a CTA's
// shared memory.
void portable_rows_ffn_cuda(CudaContext& ctx, const BatchFfnCuda& problem,
                            FewTokenWorkspace& workspace);
// Up to kMaxPortableBatch tokens on the same GPUs, without a norm.
void portable_batch_ffn_cuda(CudaContext& ctx, const BatchFfnCuda& problem,
                             FewTokenWorkspace& workspace);

}  // namespace twell
