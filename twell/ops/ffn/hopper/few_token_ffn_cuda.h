// SPDX-License-Identifier: Apache-2.0
// Host side of decode rows (1 to 8 tokens) and small batches (9 to 64), bf16 with f32 accumulation:
//   gated:      g = relu(x w_gate^T), h = f(g) * (x w_up^T) where g is active, y = h w_down
//   non-gated:  h = f(relu(x w_up^T)), y = h w_down
// f(g) is g, or g^2 for relu2.
// Optionally a residual is added, and for up to 8 tokens the RMS norm of x is computed in front.
// Reading weights bounds the time for so few tokens: this execution reads all of the first weight,
// and of the others only the rows of neurons active for at least one token.
// Exact on every input: with every neuron active it reads what the dense layer reads. g is rounded
// to bf16; h is rounded once, after the product in f32. A NaN in the gate counts as active.
// Deterministic. Never synchronises; can be captured in a CUDA graph.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <string>

#include "twell/base/cuda.h"
#include "twell/format/activity_cuda.h"

namespace twell {

// All pointers are device memory, matrices contiguous row-major, 16-byte aligned.
struct FewTokenFfnCuda {
  int64_t tokens = 0;                       // M, at most 64
  int64_t width = 0;                        // D, a multiple of 8
  int64_t ffn = 0;                          // F, a multiple of 8
  const __nv_bfloat16* x = nullptr;         // [M, D]
  const __nv_bfloat16* w_gate = nullptr;    // [F, D], or null: no gate
  const __nv_bfloat16* w_up = nullptr;      // [F, D]
  const __nv_bfloat16* w_down = nullptr;    // [F, D]
  __nv_bfloat16* y = nullptr;               // [M, D], every element written
  const __nv_bfloat16* norm = nullptr;      // [D] weight of the norm, or null
  float eps = 1e-5f;                        // of the norm
  const __nv_bfloat16* residual = nullptr;  // [M, D] or null; it and x may be y
  ActivityCuda* activity = nullptr;         // added to: tokens, nnz; may be null
  bool squared = false;                     // f(g) = g^2
  // The first weight may be read while the predecessor of this call still runs. Only for weights
  // that no earlier work on the stream writes.
  bool weights_are_constant = false;
};

inline constexpr int64_t kMaxFewTokens = 64;

// Device memory of one call in flight, for up to kMaxFewTokens.
class FewTokenWorkspace {
 public:
  explicit FewTokenWorkspace(int64_t max_ffn);

  int64_t max_ffn() const { return max_ffn_; }
  int64_t bytes() const { return hidden_.bytes() + fired_.bytes() + arrived_.bytes(); }

 private:
  friend void few_token_ffn_cuda(CudaContext&, const FewTokenFfnCuda&, FewTokenWorkspace&);
  int64_t max_ffn_;
  DeviceBuffer<__nv_bfloat16> hidden_;  // [F, M rounded up to 8 or 64]
  DeviceBuffer<uint64_t> fired_;        // active neurons, 0 between calls
  DeviceBuffer<uint32_t> arrived_;      // 0 between calls
  bool rows_prepared_ = false;  // the kernels of up to 8 tokens may take their shared memory
  int clusters_ = 0;            // of small batches that fit into the device; 0: not prepared yet
};

// Why the problem cannot run on this context's device; empty when it can.
std::string few_token_ffn_unsupported(const CudaContext& ctx, const FewTokenFfnCuda& problem);

// Throws Error where unsupported, or larger than the workspace.
void few_token_ffn_cuda(CudaContext& ctx, const FewTokenFfnCuda& problem,
                        FewTokenWorkspace& workspace);

}  // namespace twell
